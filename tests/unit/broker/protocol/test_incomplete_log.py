"""Chunked messages of which not all came are named, and a flood of them is a few lines."""

from __future__ import annotations

import pytest

from broker.position import Position
from broker.protocol.chunks import Incomplete
from broker.protocol.incomplete_log import NAMED, SPAN_SECONDS, IncompleteLog


def test_a_flood_of_them_is_a_few_lines_a_minute_and_their_number(caplog: pytest.LogCaptureFixture) -> None:
    log = IncompleteLog("t")
    for n in range(1_000):
        log.note([Incomplete(Position(1, n), "why")], n / 100)
    assert len(caplog.messages) == NAMED
    assert caplog.messages[0] == "t: of a chunked message that begins with 1:0 not all came: why"
    log.note([], SPAN_SECONDS - 1)
    assert len(caplog.messages) == NAMED
    log.note([], SPAN_SECONDS)
    assert caplog.messages[NAMED:] == ["t: of 980 more chunked messages not all came"]
    log.note([], 2 * SPAN_SECONDS)
    log.note([Incomplete(Position(1, 2_000), "late")], 3 * SPAN_SECONDS)
    assert caplog.messages[NAMED + 1 :] == ["t: of a chunked message that begins with 1:2000 not all came: late"]
