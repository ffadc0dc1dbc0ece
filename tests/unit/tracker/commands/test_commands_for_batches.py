"""Commands for an entry with several messages: for one of them, for all, and for the rest of them."""

from __future__ import annotations

import pyarrow as pa

from tests.support.tracker.control_desk import ALONE, BATCH, NOTHING, Desk, apply_to_batch
from tests.support.tracker.messages import batches, command, commands
from tracker.commands.kinds import RESCHEDULE
from tracker.commands.match import with_released
from tracker.schemas import KNOWN
from tracker.wire.delaylake_pb2 import Result


def test_one_message_of_a_batch_is_cancelled_alone(desk: Desk) -> None:
    assert apply_to_batch(desk, [command("r", 1, 8, batch_index=1)]) == [(1, Result.APPLIED)]
    assert desk.subscription_mask(BATCH) == [0b11, 0b10, 0b11]


def test_an_entry_whole_has_one_outcome(desk: Desk) -> None:
    assert apply_to_batch(desk, [command("r", 1, 8)]) == [(-1, Result.APPLIED)]
    assert desk.subscription_mask(BATCH) == [0b10] * 3


def test_all_messages_of_a_batch_one_by_one_are_the_entry_whole(desk: Desk) -> None:
    for i in (2, 0, 1):
        apply_to_batch(desk, [command(f"r{i}", 1, 8, batch_index=i)])
    whole = Desk()
    apply_to_batch(whole, [command("r", 1, 8)])
    for each in (desk, whole):
        each.save()
    assert desk.store.get("taken_back", (1, 0)) == whole.store.get("taken_back", (1, 0))
    assert desk.state.cancelled.count == 1
    assert apply_to_batch(desk, [command("s", 1, 8)]) == [(-1, Result.ALREADY_APPLIED)]


def test_the_rest_of_an_entry_is_applied_where_part_of_it_was_before(desk: Desk) -> None:
    apply_to_batch(desk, [command("r", 1, 8, batch_index=1)])
    assert apply_to_batch(desk, [command("s", 1, 8)]) == [(-1, Result.APPLIED)]
    assert desk.subscription_mask(BATCH) == [0b10] * 3
    desk.save()
    assert desk.state.cancelled.count == 1


def test_an_entry_of_which_part_is_handed_out_has_an_outcome_for_each_message(desk: Desk) -> None:
    desk.at(5, released=50_001)
    assert apply_to_batch(desk, [command("r", 1, 8)]) == [
        (0, Result.TOO_LATE),
        (1, Result.TOO_LATE),
        (2, Result.APPLIED),
    ]
    assert desk.subscription_mask(BATCH) == [0b11, 0b11, 0b10]
    desk.at(6, released=50_002)
    assert apply_to_batch(Desk().at(6, 50_002), [command("r", 1, 8)]) == [(-1, Result.TOO_LATE)]


def test_messages_moved_to_many_times_in_one_tick_are_where_the_last_command_says(desk: Desk) -> None:
    named = [(7, -1, 60_000), (8, 1, 61_000), (8, 2, 62_000), (7, 0, 63_000), (8, -1, 64_000), (8, 0, 65_000)]
    rows = [
        command(f"r{i}", 1, entry, [0], index, time, kind=RESCHEDULE) for i, (entry, index, time) in enumerate(named)
    ]
    payload_rows = pa.concat_tables([ALONE, BATCH])
    ids = {f"r{i}": 1 for i in range(6)}
    published = desk.publish(commands(rows), ids, payload_rows, payload_rows=payload_rows)
    assert set(published["result"].to_pylist()) == {Result.APPLIED}
    moves = desk.state.take_moves()
    wanted = moves.filter(pa.array([masks & 1 > 0 for masks in desk.subscription_mask(moves)])).to_pylist()
    assert {(m["entry_id"], m["batch_index"], m["deliver_at"]) for m in wanted} == {
        (7, -1, 63_000),
        (8, 0, 65_000),
        (8, 1, 64_000),
        (8, 2, 64_000),
    }


def test_only_what_a_command_names_one_by_one_is_summed_up(desk: Desk) -> None:
    desk.at(5, released=50_001)
    rows = [command("whole", 1, 8), *(command("single", 1, 8, batch_index=i) for i in range(3))]
    rows = [row | {"sum_up": True} for row in [*rows, command("alone", 1, 7)]]
    known = pa.concat_tables([BATCH, ALONE]).select(KNOWN.names)
    published = desk.publish(commands(rows), dict.fromkeys(["whole", "single", "alone"], 1), known).to_pylist()
    assert {(o["request_id"], o["batch_index"], o["sum_up"]) for o in published} == {
        *(("whole", i, False) for i in range(3)),
        *(("single", i, True) for i in range(3)),
        ("alone", -1, True),
    }


def test_a_batch_index_that_the_entry_does_not_have_is_invalid(desk: Desk) -> None:
    assert apply_to_batch(desk, [command("r", 1, 8, batch_index=3)]) == [(3, Result.INVALID)]
    assert apply_to_batch(desk, [command("s", 1, 7, batch_index=1)], ALONE) == [(1, Result.INVALID)]
    assert apply_to_batch(desk, [command("t", 1, 7, batch_index=0)], ALONE) == [(-1, Result.APPLIED)]


def test_what_of_an_entry_is_in_no_bucket_was_handed_out_before() -> None:
    found = batches([(1, 8, 1, 3, 50_001), (1, 9, -1, 2, 0), (1, 7, -1, 1, 50_000)]).select(KNOWN.names)
    rows = with_released(found)
    assert sorted(
        zip(rows["entry_id"].to_pylist(), rows["batch_index"].to_pylist(), rows["deliver_at"].to_pylist(), strict=True)
    ) == [(7, -1, 50_000), (8, 0, 0), (8, 1, 50_001), (8, 2, 0), (9, 0, 0), (9, 1, 0)]
    assert with_released(NOTHING).num_rows == 0
