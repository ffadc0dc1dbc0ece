"""Shaped messages of releases that are late: sent one release after another, as far apart as they were due."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from conf.settings import Settings
from streaming.release.attempt import Assignment, Attempt, SendReport
from streaming.release.driver import remainder_sender
from streaming.release.driver.lane_release import Remainder, lane_release_of
from streaming.release.driver.spacing import Spacing
from streaming.release.outgoing import delivered
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.sending_order import by_time
from tests.support.servers.fake_destinations import seen
from tests.support.service.plans import sends_of
from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.in_flight import Release
from tracker.packing import pack
from tracker.shaping.token_bucket import first_due, spans

SENDING = (
    f'{{"batch_millis": 5, "routes": {{"{TOPIC}": [["a", "{TOPIC}-a"], ["b", "{TOPIC}-b"]]}}, '
    f'"shaped": {{"now": 2000, "subscriptions": {{"{TOPIC}": [1]}}}}}}'
)
SETTINGS = Settings.model_validate({"routes": [{"source": TOPIC, "subscriptions": [{"name": "a"}, {"name": "b"}]}]})


def test_what_is_on_time_is_not_put_off() -> None:
    spacing = Spacing()
    assert spacing.put_off({(TOPIC, 1): (5_000, 6_000)}, now=4_000) == {}
    assert spacing.put_off({(TOPIC, 1): (6_000, 6_500)}, now=6_400) == {}


def test_releases_that_are_late_go_one_after_another() -> None:
    spacing = Spacing()
    first = spacing.put_off({(TOPIC, 1): (5_000, 6_000), (TOPIC, 2): (5_000, 6_000)}, now=20_000)
    assert first == {(TOPIC, 1): 15_200, (TOPIC, 2): 15_200}
    assert spacing.put_off({(TOPIC, 1): (6_000, 7_000)}, now=20_000) == {(TOPIC, 1): 15_200}
    # What is due before the last of them goes after it, and then it is as if nothing had been.
    assert spacing.put_off({(TOPIC, 1): (21_500, 22_000)}, now=20_300) == {(TOPIC, 1): 700}
    assert spacing.put_off({(TOPIC, 1): (22_700, 23_000)}, now=21_000) == {}


def test_what_is_tried_again_does_not_come_after_what_has_failed() -> None:
    spacing = Spacing()
    shaped = {(TOPIC, 1): (5_000, 40_000)}
    put_off = spacing.put_off(shaped, now=50_000)
    assert put_off == {(TOPIC, 1): 45_200}
    spacing.forget(shaped, put_off)
    assert spacing.put_off(shaped, now=51_000) == {(TOPIC, 1): 46_200}
    other = spacing.put_off({(TOPIC, 1): (41_000, 42_000)}, now=51_000)
    spacing.forget(shaped, {(TOPIC, 1): 46_200})  # another one comes after it
    ends_at = 42_000 + other[TOPIC, 1]
    assert spacing.put_off({(TOPIC, 1): (43_000, 43_000)}, now=51_000) == {(TOPIC, 1): ends_at - 43_000}


def test_the_plan_sends_as_much_later_and_keeps_sequence_ids_and_batches() -> None:
    rows = release_rows(messages([(1, 0, 1_500), (1, 1, 2_001), (1, 2, 2_040)]), 0b11, SENDING)
    assert spans(rows) == {(TOPIC, 1): (2_000, 2_040)}  # what was overdue counts from when it was handed out
    assignment = Assignment("app", 0, 9, True, pack(rows))
    job = lane_release_of(9, True, [assignment], 12)
    assert job.shaped == {(TOPIC, 1): (2_000, 2_040)}
    plain = plan_release(SETTINGS, assignment, Attempt())
    late = plan_release(SETTINGS, assignment, Attempt(put_off={job.id: {(TOPIC, 1): 10_000, (TOPIC, 7): 1}}))

    def sent(plan_: object) -> list[tuple[str | None, int]]:
        return [(send.subscription, send.at) for send, _ in by_time([plan_])]  # type: ignore[list-item]

    assert sent(plain) == [("a", 1_500), ("b", 1_500), ("a", 2_001), ("b", 2_001), ("a", 2_040), ("b", 2_040)]
    assert sent(late)[:3] == [("a", 1_500), ("a", 2_001), ("a", 2_040)]
    assert sent(late)[3:] == [("b", 12_000), ("b", 12_001), ("b", 12_040)]
    for one, other in zip(sends_of(plain), sends_of(late), strict=True):
        assert (one.sequence_id, one.first_id, one.producer) == (other.sequence_id, other.first_id, other.producer)


def test_a_remainder_is_not_put_off_by_as_much_as_an_older_one_beside_it_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hours = 7 * 3_600_000
    releases = []
    for tick, dispatched in ((9, 2_000), (10, 2_000 + hours)):
        rows = release_rows(
            messages([(tick, n, dispatched + 20 * n) for n in range(3)]),
            0b10,
            SENDING.replace('"now": 2000', f'"now": {dispatched}'),
        )
        releases.append(lane_release_of(tick, True, [Assignment("app", 0, tick, True, pack(rows))], 12))
    attempts: list[Attempt] = []

    def run(assignments: object, tasks: int, attempt: Attempt, checked_at: float) -> list[SendReport]:
        attempts.append(attempt)
        return []

    spark_jobs = SimpleNamespace(use_pool=lambda: None, check_epoch=lambda: 0.0, run=run)
    records = mock.Mock(last_tick=mock.Mock(return_value=-1))
    monkeypatch.setattr(remainder_sender, "time", mock.Mock(time_ns=lambda: (2_400 + hours) * 1_000_000))
    names = SimpleNamespace(generations={})
    sending = SimpleNamespace(spark_jobs=spark_jobs, names=names, spacing=Spacing())
    sender = remainder_sender.RemainderSender(sending, mock.Mock(), records, mock.Mock(), threading.Event())  # type: ignore[arg-type]
    sender.send([Remainder(release, (TOPIC, "b")) for release in releases], is_slow=False)
    [attempt] = attempts
    plans = [plan_release(SETTINGS, one, attempt) for release in releases for one in release.assignments]
    begin = 2_600 + hours
    assert [send.at for send, _ in by_time(plans)] == [begin + n for n in (0, 20, 40, 40, 60, 80)]


def test_what_is_open_does_not_count_as_in_flight() -> None:
    rows = release_rows(messages([(1, 0, 2_500)]), 0b10, SENDING)
    still_open = rows.append_column("place", rows["deliver_at"])
    assert first_due([Release(9, True, rows), Release(8, True, still_open)]) == {(TOPIC, 1): 2_500}


def test_a_message_tells_when_it_was_due_only_where_it_was_shaped() -> None:
    rows = messages([(1, 0, 2_500)], properties=[("delaylake.shapedFrom", "1"), ("own", "x")])
    columns = {name: rows[name].to_pylist() for name in rows.column_names}
    assert "delaylake.shapedFrom" not in seen(delivered(columns, 0, 2_500, 1)).properties
    columns["shaped_from"] = [1_000]
    properties = seen(delivered(columns, 0, 2_500, 1)).properties
    assert (properties["delaylake.shapedFrom"], properties["delaylake.deliverAt"]) == ("1000", "2500")
