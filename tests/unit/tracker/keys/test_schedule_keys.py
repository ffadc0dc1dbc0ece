"""Messages with schedule keys: single behaviours, and what of a key is wrong."""

from __future__ import annotations

import pytest

from tests.support.tracker.keyed import Job, by_key, keyed
from tests.support.tracker.messages import TOPIC, batches, command
from tracker.commands.kinds import REPEAT, RESCHEDULE, SKIP
from tracker.due_time import BadScheduleError
from tracker.keys import cold_keys
from tracker.keys.live_keys import LiveKeys
from tracker.messages import concat
from tracker.properties import schedule_key
from tracker.schemas import PauseChange
from tracker.store import MemoryStore
from tracker.wire.delaylake_pb2 import Result


@pytest.mark.slow
def test_of_very_many_messages_of_a_key_one_is_sealed_and_delivered() -> None:
    job = Job(2)
    job.step()
    rows = batches(
        [(1, i, -1, 1, 5_000) for i in range(10_000)],
        publish_time=0,
        properties=[("scheduleKey", "k")],
        schedule_key="k",
    )
    job.step(rows)
    job.step()
    assert job.sealed["entry_id"].to_pylist() == [9_999]
    job.step(later=6_000)
    assert len(job.delivered["a"]) == 1
    assert sum(row["result"] == Result.SUPERSEDED for row in job.outcomes) == 2 * 9_999
    assert len(job.all_entries()) == 10_000


def test_where_all_that_comes_in_is_known_nothing_changes() -> None:
    job = Job(1)
    job.step()
    rows = concat([keyed(1, "k", 3_000, 0), keyed(2, "other", 3_000, 0)])
    for _ in range(2):
        assert job.step(rows) == []
    job.step(later=4_000)
    assert sorted(job.delivered["a"]) == [(1, 0), (2, 0)]


def test_messages_of_a_batch_go_to_their_keys_shards_and_the_entry_is_written_down_once() -> None:
    job = Job(3)
    job.step()
    size = 6
    keys = ["a", "b", None, "c", "a", None]
    rows = concat(keyed(1, key, 3_000, 0, i, size) for i, key in enumerate(keys))
    job.step(rows)
    whole = job.step(orders=[command("r", 1, 64, (0,), kind=SKIP)])
    results = {(row["batch_index"], row["result"]) for row in whole}
    # The first was superseded by the fifth.
    assert results == {(0, Result.ALREADY_APPLIED), *((i, Result.APPLIED) for i in range(1, 6))} or results == {
        (-1, Result.APPLIED)
    }
    job.step(later=4_000)
    job.step()
    assert sorted(job.delivered["b"]) == [(1, i) for i in range(1, 6)]
    assert job.delivered["a"] == []
    assert job.all_entries() == [(1, 64)]


def test_a_message_that_is_held_back_is_replaced_and_a_kept_key_begins_anew() -> None:
    job = Job(2)
    job.step()
    job.step(concat([keyed(1, "r", 1_000, 0), keyed(2, "k", 1_000, 0)]), pauses=[PauseChange("p", TOPIC, 1, True)])
    job.step(later=2_000)
    job.step(concat([keyed(3, "r", 5_000, 2_000), keyed(4, "k", 5_000, 2_000, scheduleMode="keep")]))
    job.step(later=5_000)
    job.step(pauses=[PauseChange("q", TOPIC, 1, False)])
    job.step(later=1)
    assert sorted(job.delivered["a"]) == [(2, 0), (3, 0), (4, 0)]
    assert sorted(job.delivered["b"]) == [(1, 0), (2, 0), (3, 0), (4, 0)]


@pytest.mark.slow
def test_a_command_that_waited_applies_where_the_message_is() -> None:
    for entry in range(8):  # homes and keys are in several shards
        job = Job(3)
        job.step()
        job.step(orders=[command("r", 1, entry * 64, (0, 1), cancel_at=3_000)])
        assert {row["result"] for row in job.step(keyed(entry, "k", 3_000, 0))} == {Result.APPLIED}
        job.step(later=4_000)
        assert job.delivered == {"a": [], "b": []}
        assert not any(row["result"] == Result.NOT_FOUND for row in job.outcomes)


def test_a_command_that_comes_twice_at_once_is_answered_again_wherever_its_message_is() -> None:
    for entry in range(4):  # homes and keys are in several shards
        job = Job(3)
        job.step(keyed(entry, "k", 9_000, 0))
        first, at = command("r", 1, entry * 64, (0, 1)), entry * 64
        other = command("r", 1, at, (0, 1), kind=REPEAT, body=2)
        told = job.step(orders=[first, command("r", 1, at, (0, 1), kind=REPEAT), other])
        results = sorted((row["subscription"], row["is_repeat"] or False, row["result"]) for row in told)
        of_each = [(False, Result.APPLIED), (False, Result.INVALID), (True, Result.APPLIED)]
        assert results == [(name, *one) for name in ("a", "b") for one in of_each]


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"scheduleKey": "x" * 513}, "scheduleKey"),
        ({"scheduleKey": "ö" * 257}, "scheduleKey"),
        ({"scheduleKey": ""}, "scheduleKey"),
        ({"scheduleKey": "k", "scheduleMode": "last"}, "scheduleMode"),
        ({"scheduleKey": "k", "debounceMax": "-5s"}, "debounceMax"),
        ({"scheduleKey": "k", "debounceMax": "0"}, "debounceMax"),
        ({"scheduleKey": "k", "scheduleMode": "debounce", "debounceMax": "5 min"}, "debounceMax"),
    ],
)
def test_a_wrong_property_is_named(properties: dict[str, str], name: str) -> None:
    with pytest.raises(BadScheduleError, match=f"^{name} "):
        schedule_key(properties)


def test_a_key_of_512_bytes_is_taken() -> None:
    assert schedule_key({"scheduleKey": "ö" * 256, "scheduleMode": "debounce", "debounceMax": "1d"}) == "ö" * 256
    assert schedule_key({"scheduleMode": "anything"}) is None


@pytest.mark.slow
def test_a_cold_key_is_looked_up_where_it_is_named_and_when_its_message_is_loaded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold_keys, "GROUP_MILLIS", 700)
        job = Job(2, idle_millis=0, is_replayed=True)
        names = ["replaced", "kept", "cancelled", "moved", "by id", "held", "left alone", "loaded"]
        job.step(concat(keyed(n, key, 20_000 + 1_000 * (key == "loaded"), 0) for n, key in enumerate(names)))
        job.step()
        job.step()
        assert [n_cold(store) for store in job.stores] == [len(LiveKeys(store)) for store in job.stores]
        assert job.n_looked_up == 0
        job.step(concat([keyed(10, "replaced", 20_000, 1), keyed(11, "kept", 20_000, 1, scheduleMode="keep")]))
        assert job.superseded() == {(0, "10"), (11, "1")}
        job.step(keyed(12, "nobody's", 20_000, 1))
        n_looked_up = job.n_looked_up
        job.step(keyed(13, "nobody's, either", 20_000, 1))
        assert job.n_looked_up == n_looked_up, "a key of which nothing is known is not looked up"
        answers = job.step(orders=[by_key("c", "cancelled"), by_key("m", "moved", RESCHEDULE, 30_000)])
        assert {row["result"] for row in answers} == {Result.APPLIED}
        answers = job.step(orders=[command("i", 1, 4 * 64, (0, 1), kind=SKIP)])
        assert {row["result"] for row in answers} == {Result.APPLIED}
        job.step(pauses=[PauseChange("p", TOPIC, 1, True)])
        for request, key in [("c2", "cancelled"), ("i2", "by id")]:
            assert {row["result"] for row in job.step(orders=[by_key(request, key)])} == {Result.ALREADY_APPLIED}
        job.step()
        job.step(later=20_500)
        job.step()
        # What is held back is hot as long as it is, and is replaced.
        job.step(keyed(14, "held", 25_000, 20_600))
        assert sum(row["result"] == Result.SUPERSEDED and row["subscription"] == "a" for row in job.outcomes) == 3
        job.step(keyed(15, "loaded", 26_000, 20_600))
        job.step(keyed(16, "moved", 26_000, 20_600))
        job.step(pauses=[PauseChange("q", TOPIC, 1, False)])
        for _ in range(3):
            job.step(later=5_000)
        assert sorted(entry for entry, _ in job.delivered["b"]) == [1, 5, 6, 10, 12, 13, 14, 15, 16]
        assert sorted(entry for entry, _ in job.delivered["a"]) == [1, 6, 10, 12, 13, 14, 15, 16]
        for _ in range(3):
            job.step()
        assert all(len(LiveKeys(store)) == 0 for store in job.stores)


def n_cold(store: MemoryStore) -> int:
    return LiveKeys(store).n_cold
