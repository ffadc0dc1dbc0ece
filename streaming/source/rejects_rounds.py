"""Rounds in which rejects topics get what they lack, because they could not be written: of bounded bytes each.

Until a topic has had all of it, further rejects of its source topic go to the table alone, and come in a later round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streaming.checkpoint.offset import Offset
from streaming.release.feedback import Feedback
from streaming.source.clock import MAX_LARGE_BYTES
from warehouse.delta.tables import Tables
from warehouse.queries.held_rejects import ROUND_BYTES, RejectKey, Span, find_round


def is_round_due(last: Offset, feedback: Feedback) -> bool:
    """Whether some rejects topic that can be written lacks rejects, and there is room for a round.

    Args:
        last: the last offset.
        feedback: of the driver.
    """
    return bool(last.rejects_since.keys() - _unwritable(last.unwritable)) and _has_room(feedback)


def add_round(offset: Offset, last: Offset, feedback: Feedback, tables: Tables) -> Offset:
    """Returns an offset with the rejects that its batch sends again, and with the topics that lack some after it.

    Args:
        offset: the new offset, with its tick and `unwritable`.
        last: the offset before.
        feedback: of the driver.
        tables: of the warehouse.
    """
    unwritable = _unwritable(offset.unwritable)
    since = {topic: last.rejects_since.get(topic, offset.tick) for topic in (*last.rejects_since, *sorted(unwritable))}
    to, version = dict(last.rejects_to), 0
    if (lacking := sorted(since.keys() - unwritable)) and _has_room(feedback):
        version, left = tables.version("rejects"), ROUND_BYTES
        for topic in lacking:
            if left <= 0:
                break
            found = find_round(tables, version, topic, _sent_to(last, topic), left)
            left -= found.n_bytes
            if found.to is None:
                del since[topic]
                to.pop(topic, None)
            else:
                to[topic] = list(found.to)
    return replace(offset, rejects_since=since, rejects_to=to, rejects_version=version)


def spans_of_round(first: Offset, last: Offset) -> list[Span]:
    """Returns the rejects that the batch between two offsets sends again; an earlier program sent all at once."""
    spans = []
    for topic in first.rejects_since:
        after, to = _sent_to(first, topic), last.rejects_to.get(topic)
        if topic not in last.rejects_since:
            spans.append(Span(topic, after, None))
        elif to is not None and RejectKey(*to) > after:
            spans.append(Span(topic, after, RejectKey(*to)))
    return spans


def _sent_to(offset: Offset, topic: str) -> RejectKey:
    """Returns the key of the last reject of a source topic that has been sent again."""
    to = offset.rejects_to.get(topic)
    return RejectKey.before_tick(offset.rejects_since[topic]) if to is None else RejectKey(*to)


def _unwritable(unwritable: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Returns the source topics whose rejects topic can't be written."""
    return {topic for topic, names in unwritable.items() if "" in names}


def _has_room(feedback: Feedback) -> bool:
    on_their_way = feedback.in_flight_bytes + feedback.large_bytes
    return not on_their_way or MAX_LARGE_BYTES - on_their_way >= ROUND_BYTES
