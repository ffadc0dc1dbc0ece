"""Releases that are handed out and not confirmed."""

from __future__ import annotations

import pyarrow as pa

from tests.support.tracker.messages import TOPIC, messages, release_rows
from tracker.in_flight import PLACE, PLANNED, REJECTED, SENDING, SUBSCRIPTION_MASK, InFlight, Release
from tracker.messages import MESSAGES, with_columns
from tracker.packing import unpack
from tracker.store import MemoryStore


def release(tick: int, is_planned: bool = True, n: int = 2) -> Release:
    rows = messages([(1, i, tick) for i in range(n)], payload=b"x")
    return Release(tick, is_planned, release_rows(rows, range(n), f'{{"lanes": {tick}}}'))


def ticks(in_flight: InFlight) -> list[tuple[int, int]]:
    return [(r.tick, r.kind) for r in in_flight.all_releases()]


def test_releases_come_back_as_they_were_oldest_first() -> None:
    in_flight = InFlight(MemoryStore())
    sent = [release(1), release(2, False, 3), release(2, True)]
    for one in sent:
        in_flight.add_release(one)
    assert len(in_flight) == 7
    for one, other in zip(in_flight.all_releases(), sent, strict=True):
        assert (one.tick, one.kind) == (other.tick, other.kind)
        assert one.rows.equals(other.rows, check_metadata=True)
    assert len(in_flight.all_releases()) == 3


def test_what_is_open_of_releases_of_an_earlier_program_comes_with_that_of_newer_ones() -> None:
    in_flight = InFlight(MemoryStore())
    old, new = release(1), release(2)
    in_flight.add_release(Release(1, True, old.rows.drop_columns(["schedule_key", "key_since"])))
    in_flight.add_release(new)
    taken = in_flight.take_given_up({(1, True): {TOPIC: 1}, (2, True): {TOPIC: 1}})
    assert (taken.num_rows, taken["schedule_key"].null_count) == (2, 2)


def test_what_is_confirmed_is_forgotten_in_the_store_too() -> None:
    store = MemoryStore()
    in_flight = InFlight(store)
    for tick in (3, 5, 7):
        in_flight.add_release(release(tick, False))
        in_flight.add_release(release(tick, True))
    in_flight.confirm_releases(2)
    assert len(in_flight) == 12
    in_flight.confirm_releases(5)
    assert ticks(in_flight) == [(7, False), (7, True)]
    assert sorted(key for table, key in store.values if table == "in_flight") == [(7, 0), (7, 1)]
    in_flight.confirm_releases(9)
    in_flight.confirm_releases(9)
    assert len(in_flight) == 0
    assert in_flight.all_releases() == []


def test_another_run_finds_what_was_saved() -> None:
    store = MemoryStore()
    in_flight = InFlight(store)
    in_flight.add_release(release(4))
    in_flight.add_release(release(6))
    in_flight.save()
    again = InFlight(store)
    assert (len(again), ticks(again)) == (4, [(4, True), (6, True)])
    again.confirm_releases(4)
    again.save()
    assert ticks(InFlight(store)) == [(6, True)]


def test_what_has_not_changed_is_not_written() -> None:
    store = MemoryStore()
    InFlight(store).add_release(release(4))
    in_flight = InFlight(store)
    in_flight.add_release(release(4))
    in_flight.save()
    store.put = None  # type: ignore[method-assign, assignment]
    in_flight.save()
    InFlight(store).save()


def test_what_has_not_arrived_everywhere_stays_with_its_places_until_it_has() -> None:
    store = MemoryStore()
    in_flight = InFlight(store)
    rows = messages([(1, i, 5) for i in range(4)], payload=b"x")
    in_flight.add_release(Release(5, True, release_rows(rows, [1, 2, 3, 2])))
    in_flight.add_release(release(6))
    opened = in_flight.confirm_releases(5, {(5, True): {TOPIC: 2}})
    assert [(r.tick, r.kind) for r in opened] == [(5, True)]
    assert (len(in_flight), in_flight.open) == (2, 3)
    in_flight.save()

    again = InFlight(store)
    assert again.confirm_releases(5, {(5, True): {TOPIC: 2}}) == []
    left = again.all_releases()[0].rows
    assert left["entry_id"].to_pylist() == left[PLACE].to_pylist() == [1, 2, 3]
    assert left["subscription_mask"].to_pylist() == [2, 2, 2]
    assert left.schema.metadata == {SENDING.encode(): b"{}"}
    assert again.confirm_releases(5, {(5, True): {"another": 2}, (6, True): {TOPIC: 1}}) == []
    assert ticks(again) == [(6, True)]
    assert again.open == 0


def test_what_was_rejected_is_open_by_itself() -> None:
    in_flight = InFlight(MemoryStore())
    rows = pa.concat_tables([messages([(1, 0, 5)], reason="bad"), messages([(1, 1, 5)])])
    in_flight.add_release(Release(5, False, release_rows(rows, [0, 1])))
    in_flight.confirm_releases(5, {(5, False): {TOPIC: REJECTED}})
    assert in_flight.all_releases()[0].rows["entry_id"].to_pylist() == [0]


def test_the_store_has_the_column_names_that_checkpoints_have() -> None:
    store = MemoryStore()
    in_flight = InFlight(store)
    in_flight.add_release(release(4))
    [body] = [value for (table, *_), value in store.values.items() if table == "in_flight"]
    stored = unpack(body)
    assert stored.column_names == [*MESSAGES.names, "wants"]
    assert stored.schema.metadata == {b"sending": b'{"lanes": 4}'}
    assert in_flight.all_releases()[0].rows["subscription_mask"].to_pylist() == [0, 1]


def test_dead_letters_are_open_by_themselves_as_the_release_says_what_one_is() -> None:
    in_flight = InFlight(MemoryStore(), {TOPIC: ["a", "b"]})
    rows = with_columns(messages([(1, entry, 5) for entry in range(3)]), attempt=pa.array([None, 1, 9], pa.int32()))
    sending = f'{{"attempts": {{"{TOPIC}": {{"a": 10}}}}}}'
    in_flight.add_release(Release(1, PLANNED, release_rows(rows, 0b11, sending)))
    open_releases = {(1, PLANNED): {TOPIC: 0b01, f"{TOPIC} dlq": 0b11}}
    [opened] = in_flight.confirm_releases(1, open_releases)
    assert opened.rows[SUBSCRIPTION_MASK].to_pylist() == [0b01, 0b01, 0b11]
    assert in_flight.confirm_releases(2, open_releases) == []
    taken = in_flight.take_given_up({(1, PLANNED): {TOPIC: 0b11}})
    assert taken[SUBSCRIPTION_MASK].to_pylist() == [0b01, 0b01, 0b01]
    [left] = in_flight.all_releases()
    assert (left.rows["entry_id"].to_pylist(), left.rows[SUBSCRIPTION_MASK].to_pylist()) == ([2], [0b10])
    assert left.rows["place"].to_pylist() == [2]
    in_flight.confirm_releases(4, {})
    assert in_flight.all_releases() == []
