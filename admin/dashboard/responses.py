"""Answers to a browser: rendered templates and static files, with security headers."""

from __future__ import annotations

import json
import math
import mimetypes
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from admin.errors import AdminError
from admin.security.policy import TOKEN_COOKIE, Reader
from conf.settings import Subscription
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT

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


COOKIE = TOKEN_COOKIE

_FOLDER = Path(__file__).parent

_STATIC = {file.name: file.read_bytes() for file in (_FOLDER / "static").iterdir()}

_HEADERS = {
    # Nothing is fetched from elsewhere, and only scripts in files of this API run.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_HTML = "text/html; charset=utf-8"

_AT_ONCE = Markup("<!-- what is above is shown at once -->")  # in templates AT_ONCE

SETTINGS = "/ui/settings"  # for administrators

NAVIGATION = [
    ("/", "Overview"),
    ("/ui/schedule", "Schedule"),
    ("/ui/messages", "Messages"),
    ("/ui/recurring", "Recurring"),
    ("/ui/retries", "Retries"),
    ("/ui/control", "Control log"),
    ("/ui/storage", "Storage"),
    (SETTINGS, "Settings"),
]

_environment = Environment(loader=FileSystemLoader(_FOLDER / "templates"), autoescape=True, trim_blocks=True)

_environment.globals["AT_ONCE"] = _AT_ONCE


def page(request: Request, template: str, caller: Reader | None = None, code: int = 200, **values: Any) -> Response:
    """Renders a whole page.

    Args:
        template: file name of the template.
        caller: the caller; None: unknown, as on the login page.
        code: the HTTP status.
        values: values of the template's variables.
    """
    return Response("".join(_rendered(request, template, caller, values)), code, _HEADERS, _HTML)


def page_in_parts(request: Request, template: str, caller: Reader, code: int, **values: Any) -> Response:
    """Renders a page, and sends the part before AT_ONCE before the rest is rendered.

    The arguments are those of `page`. Functions that the template calls after AT_ONCE must not raise.
    """
    return StreamingResponse(_in_parts(_rendered(request, template, caller, values)), code, _HEADERS, _HTML)


def _in_parts(pieces: Iterable[str]) -> Iterator[str]:
    joined: list[str] = []
    for piece in pieces:
        joined.append(piece)
        if _AT_ONCE in piece:
            yield "".join(joined)
            joined.clear()
    yield "".join(joined)


def _rendered(request: Request, template: str, caller: Reader | None, values: dict[str, Any]) -> Iterator[str]:
    common = {
        "navigation": [entry for entry in NAVIGATION if entry[0] != SETTINGS or (caller and caller.is_admin)],
        "path": request.url.path,
        "caller": caller,
        "topic_names": short_names([route.source for route in caller.routes]) if caller else {},
        "now": time.time_ns() // 1_000_000,
        "version": version("delaylake"),
        "is_protected": request.app.state.settings.auth.enabled,
    }
    return _environment.get_template(template).generate(**{**common, **values})


def error_page(request: Request, code: int, reason: str) -> Response:
    """Renders the page for an error: the login page for a 401, else a page with the reason."""
    if code == 401:
        return page(request, "login.html", code=code, problem=reason if TOKEN_COOKIE in request.cookies else None)
    title = {403: "Not allowed", 404: "Not there", 503: "Not ready"}.get(code, "That did not work")
    return page(request, "error.html", code=code, title=title, problem=reason)


def part(request: Request, template: str, caller: Reader, **values: Any) -> Response:
    """Renders a part of a page that the page loads separately."""
    common = {"now": time.time_ns() // 1_000_000, "topic_names": short_names([route.source for route in caller.routes])}
    text = _environment.get_template(template).render(**{**common, **values})
    return Response(text, headers=_HEADERS, media_type=_HTML)


def static_file(name: str) -> Response:
    if name not in _STATIC:
        raise AdminError(404, f"no such file: {name[:100]!r}")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    headers = {"Cache-Control": "max-age=3600", "X-Content-Type-Options": "nosniff"}
    return Response(_STATIC[name], headers=headers, media_type=kind)


def _time(millis: int | None, form: str = "whole") -> Markup:
    """Formats a time in UTC. `times.js` shows it in the zone that the user has chosen.

    Args:
        millis: the time, ms since the epoch; None or 0: none.
        form: "whole": with ms and zone; "cell": without the zone, which the column's heading has; "short": without ms,
            too.
    """
    if not millis:
        return Markup("&ndash;")
    if millis >= HELD_DELIVER_AT:
        return Markup('<span class="tag">{}</span>').format("paused" if millis >= PAUSED_DELIVER_AT else "held back")
    try:
        text = datetime.fromtimestamp(millis / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")[:-6]
    except (ValueError, OverflowError):
        return Markup("{} ms").format(millis)
    shown = {"whole": f"{text} UTC", "cell": text, "short": text[:19]}[form]
    return Markup('<time datetime="{}Z" data-form="{}">{}</time>').format(text.replace(" ", "T"), form, shown)


def _span(millis: float | None) -> str:
    """Formats a duration, in ms, with the unit that fits."""
    if millis is None:
        return "-"
    size = abs(millis)
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if size >= length:
            return f"{millis / length:.1f} {unit}".replace(".0 ", " ")
    return f"{millis:.0f} ms"


def _size(n_bytes: int) -> str:
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= length:
            return f"{n_bytes / length:.1f} {unit}"
    return f"{n_bytes} B"


def _code(text: str | None) -> Markup:
    """Formats a text as HTML, with the parts between backticks as code."""
    parts = (text or "").split("`")
    return Markup().join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def _rules(subscription: Subscription) -> list[str]:
    """Returns a subscription's settings of rate, windows, order and backoff, as in a settings file; times in ms."""
    values = subscription.model_dump(mode="json", include={"rate", "windows", "order", "backoff"})
    return [
        yaml.safe_dump({name: value}, default_flow_style=True, sort_keys=False, width=math.inf).strip()[1:-1]
        for name, value in values.items()
        if value not in (None, [], "none")
    ]


_environment.filters |= {
    "code": _code,
    "rules": _rules,
    "time": _time,
    "topic": topic_html,
    "span": _span,
    "size": _size,
    "count": lambda n: "-" if n is None else f"{n:,}",
    "attribute_json": lambda value: json.dumps(value),
}
