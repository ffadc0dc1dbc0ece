"""What an attempt to send remainders leaves where it fails."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

from streaming.release.driver.remainder_sender import RemainderSender
from streaming.release.driver.spacing import Spacing


@pytest.mark.parametrize("what", ["the table can't be read", "the task is lost"])
def test_an_attempt_that_has_failed_puts_the_next_one_off_no_further(what: str) -> None:
    spacing, records, sending, remainder = Spacing(), mock.Mock(), mock.Mock(), mock.Mock()
    records.last_tick.return_value = -1
    records.recorded.side_effect = OSError(what) if "table" in what else lambda *_: frozenset()
    sending.spacing, sending.spark_jobs.run.side_effect = spacing, OSError(what)
    remainder.configure_mock(recipient=("t", "a"), release_id=(5, 0), is_resumed=True, done=frozenset(), arrived_to={})
    remainder.release.configure_mock(tick=5, lane="l", sent_to=0, shaped={("t", 0): (1_000, 61_000)}, assignments=[])
    sender = RemainderSender(sending, mock.Mock(), records, lambda rows: None, threading.Event())
    for _ in range(3):
        with pytest.raises(OSError, match=what):
            sender.send([remainder], False)
    assert not spacing._until
