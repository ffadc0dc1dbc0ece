"""Short names of topics: without the parts that all have in common. The full name is in the tooltip."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

_DOMAIN = "persistent://"


def short_names(topics: Sequence[str]) -> dict[str, str]:
    """Returns a short name for each topic: without the tenant and namespace if all topics have the same."""
    parts = [topic.removeprefix(_DOMAIN).split("/") for topic in topics]
    shared = 0
    while parts and all(len(p) > shared + 1 and p[: shared + 1] == parts[0][: shared + 1] for p in parts):
        shared += 1
    return {topic: "/".join(p[shared:]) for topic, p in zip(topics, parts, strict=True)}


def topic_html(topic: str | None, names: dict[str, str]) -> Markup:
    """Returns a topic as HTML: its short name, or else its name without the domain."""
    if not topic:
        return Markup("")
    return Markup('<span title="{}">{}</span>').format(topic, names.get(topic, topic.removeprefix(_DOMAIN)))
