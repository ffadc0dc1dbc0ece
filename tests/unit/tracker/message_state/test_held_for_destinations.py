"""A shard while destinations can't be written: what is kept, what a rebuild would find, and what comes out later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.support.naive.parked import rounds
from tests.support.tracker.messages import TOPIC, command, commands, handed_out, messages, positions, resumed, tick_at
from tests.support.tracker.shaped_service import rate
from tracker.in_flight import PLACE
from tracker.message_state.changes import select_parked
from tracker.message_state.parking import Round
from tracker.messages import concat, in_order_of_dues, with_columns
from tracker.schemas import KNOWN, PauseChange
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.subscriptions import Subscriptions
from tracker.tick import Effects, TickInput
from tracker.wire.delaylake_pb2 import Result

NAMES = ["a", "b"]


class Service:
    """A shard with two subscriptions, and what its buckets hold."""

    def __init__(self, in_order: int = 0) -> None:
        """Begins; `in_order` are the subscriptions, as bits, that get the messages of a key in order."""
        self.subscriptions = Subscriptions({TOPIC: NAMES}, in_order={TOPIC: in_order} if in_order else {})
        self.store = MemoryStore()
        self.tick = 0
        self.stored: list[pa.Table] = []

    def step(
        self,
        cutoff: int,
        rows: pa.Table | None = None,
        confirmed: int = 0,
        unwritable: Mapping[str, Any] | None = None,
        run_id: str = "run",
        now: int | None = None,
        drains: int = 0,
        parked_rejects: Sequence[str] = (),
        **changes: Any,
    ) -> Effects:
        self.tick += 1
        tick = tick_at(
            self.tick,
            cutoff,
            run_id=run_id,
            confirmed=confirmed,
            now=cutoff if now is None else now,
            unwritable={TOPIC: dict(unwritable)} if unwritable else {},
            drains={TOPIC: {"b": drains}} if drains else {},
            parked_rejects=parked_rejects,
        )
        tick_input = TickInput(messages=messages([]) if rows is None else rows, **changes)
        effects = Shard(self.store, self.subscriptions, 1_000_000).apply(tick, tick_input)
        self.stored.append(effects.bucket)
        return effects


def test_what_was_handed_out_stays_open_and_what_comes_due_is_held_back_until_it_is_back() -> None:
    service = Service()
    assert handed_out(service.step(10, messages([(1, 0, 5), (1, 1, 5), (1, 2, 30), (1, 3, 40)]))) == [(0, 3), (1, 3)]

    # Release 1 did not arrive at b, and no bucket has its messages: now one does.
    stuck: dict[str, Any] = {"b": {"open": [[1, 0]]}}
    effects = service.step(30, confirmed=1, unwritable=stuck)
    assert handed_out(effects) == [(2, 1)]
    copies = [row for row in effects.bucket.to_pylist() if row["deliver_at"] == 5]
    assert [(row["entry_id"], row["subscription"]) for row in copies] == [(0, "b"), (1, "b")]
    moves = [row for row in effects.cancels.to_pylist() if row["operation"] == "MOVE"]
    assert {row["sequence"] for row in copies} <= {row["sequence"] for row in moves}
    assert handed_out(service.step(40, confirmed=2, unwritable=stuck)) == [(3, 1)]

    # A new run hands out again what is open, at its old places.
    again = service.step(41, confirmed=3, unwritable=stuck, run_id="run2")
    assert handed_out(again) == [(0, 2), (1, 2)]
    assert again.releases[0].rows[PLACE].to_pylist() == [0, 1]

    back = service.step(42, confirmed=4, reinstated={TOPIC}, **resumed(concat(service.stored), "b"))
    assert handed_out(back) == [(2, 2), (3, 2)]
    assert handed_out(service.step(43, confirmed=5, run_id="run3")) == []


def test_what_is_held_back_comes_in_the_order_in_which_it_was_due() -> None:
    service = Service()
    stuck: dict[str, Any] = {"b": {"open": []}}
    service.step(0, messages([(1, entry, 10 + entry * 7 % 50) for entry in range(50)]), unwritable=stuck)
    for cutoff in range(5, 70, 5):
        service.step(cutoff, unwritable=stuck)
    back = service.step(100, reinstated={TOPIC}, **resumed(concat(service.stored), "b"))
    later = service.step(200)
    order = [entry for entry, _ in handed_out(back) + handed_out(later)]
    assert order == sorted(range(50), key=lambda entry: (10 + entry * 7 % 50, entry))


def test_nothing_that_was_held_back_comes_before_its_time() -> None:
    """What comes due within the lookahead is held back, and the destination may be there again before its time."""
    service = Service()
    service.step(100, messages([(1, 0, 1_000), (1, 1, 150)]), now=100, unwritable={"b": {"open": []}})
    assert handed_out(service.step(1_050, now=200, unwritable={"b": {"open": []}})) == [(1, 1), (0, 1)]
    back = service.step(1_050, now=300, reinstated={TOPIC}, **resumed(concat(service.stored), "b"))
    assert handed_out(back) == [(1, 2), (0, 2)]
    assert back.releases[0].rows["deliver_at"].to_pylist() == [300, 1_000]


def test_what_several_shards_held_back_is_in_order_together_also_what_came_late() -> None:
    shards = [Service(), Service()]
    stuck: dict[str, Any] = {"b": {"open": []}}
    late = [messages([(1, 100 + n, 7 + n)]) for n in range(2)]
    for n, shard in enumerate(shards):
        shard.step(0, messages([(1, entry, 10 + entry * 7 % 50) for entry in range(n, 50, 2)]), unwritable=stuck)
        for cutoff in range(5, 70, 5):
            shard.step(cutoff, unwritable=stuck)
        shard.step(70, late[n], unwritable=stuck)
    rows = []
    for shard in shards:
        effects = shard.step(100, reinstated={TOPIC}, **resumed(concat(shard.stored), "b"))
        rows += [row for release in effects.releases for row in release.rows.to_pylist()]
    rows.sort(key=lambda row: (row["deliver_at"], row["was_due"], row["entry_id"]))
    due = {entry: 10 + entry * 7 % 50 for entry in range(50)} | {100: 7, 101: 8}
    assert [row["entry_id"] for row in rows] == sorted(due, key=lambda entry: (due[entry], entry))


def test_many_messages_come_in_the_order_in_which_they_were_due_however_unevenly_shards_have_them() -> None:
    """In rounds, also those that are in no bucket yet, and those due at one time."""
    shards = [Service(), Service()]
    stuck: dict[str, Any] = {"b": {"open": []}}
    due = {n: 10 + n // 7 if n < 1_200 else 185 for n in range(1_800)}
    for n, shard in enumerate(shards):
        own = [(1, entry, due[entry]) for entry in due if (entry % 10 == 0) == (n == 0)]
        shard.step(0, messages(own), unwritable=stuck)
        for cutoff in (60, 120, 200):
            shard.step(cutoff, unwritable=stuck)
    came: list[int] = []
    sizes = []
    changes: dict[str, Any] = {"reinstated": {TOPIC}}
    for now in range(1_100, 3_000, 100):
        changes |= rounds(concat([one for shard in shards for one in shard.stored]), ["b"], 250)
        rows, left = [], set()
        for shard in shards:
            own = changes["drained"].filter(pc.equal(pc.equal(_last_digit(changes["drained"]), 0), shard is shards[0]))
            effects = shard.step(now, **(changes | {"drained": own}))
            rows += [row for release in effects.releases for row in release.rows.to_pylist()]
            left.add(tuple(effects.resuming.get(TOPIC, {}).get("b", ())[:2]))
        rows.sort(key=lambda row: (row["deliver_at"], row["was_due"], row["sequence"]))
        came += [row["was_due"] for row in rows]
        sizes.append(len(rows))
        assert left == {(changes["rounds"][TOPIC]["b"].left, 0) if changes["rounds"][TOPIC]["b"].left else ()}
        changes.clear()
        if left == {()}:
            break
    assert came == sorted(due.values())
    assert len(sizes) > 4
    assert max(sizes[:-1]) <= 300, "and what was not sealed and was due before the last of a round"


def _last_digit(rows: pa.Table) -> pa.Array:
    entries = rows["entry_id"]
    return pc.subtract(entries, pc.multiply(pc.divide(entries, 10), 10))


@pytest.mark.parametrize("is_in_order", [True, False])
def test_what_comes_due_while_much_that_was_held_back_goes_out_is_behind_it_where_keys_have_an_order(
    is_in_order: bool,
) -> None:
    service = Service(in_order=0b10 if is_in_order else 0)
    stuck: dict[str, Any] = {"b": {"open": []}}
    service.step(0, messages([(1, entry, 10 + entry // 3) for entry in range(250)], key="k"), unwritable=stuck)
    for cutoff in (50, 100):
        service.step(cutoff, unwritable=stuck)
    news = concat([messages([(2, 0, 160)], key="k"), messages([(2, 1, 170)]), messages([(2, 2, 190)], key="k")])
    came: list[tuple[int, int]] = []
    changes: dict[str, Any] = {"reinstated": {TOPIC}, "rows": news, "now": 110}
    is_resuming = True
    for cutoff in (150, 200, 250, 300, 350):
        if is_resuming:
            changes |= rounds(concat(service.stored), ["b"], 100)
        effects = service.step(cutoff, **changes)
        changes, is_resuming = {}, bool(effects.resuming)
        rows = [row for release in effects.releases for row in release.rows.to_pylist() if row["subscription_mask"] & 2]
        came += [(row["ledger_id"], row["entry_id"]) for row in rows]
    assert len(came) == 253
    if is_in_order:
        came.remove((2, 1))  # it has no key
        assert came == [*((1, entry) for entry in range(250)), (2, 0), (2, 2)]
        # A rebuild would find them: their entries may be durable before they are due.
        moved = [row for row in concat(service.stored).to_pylist() if row["ledger_id"] == 2 and row["subscription"]]
        assert {(row["entry_id"], row["was_due"]) for row in moved} == {(0, 160), (2, 190)}
    else:
        assert came[:100] == [(1, entry) for entry in range(100)]
        assert came.index((2, 0)) < came.index((1, 200))


def test_the_order_outlives_long_outages() -> None:
    service = Service()
    stuck: dict[str, Any] = {"b": {"open": []}}
    times = [1_000, 2_000, 3_600_000, 7_200_000, 86_400_000, 86_500_000, 86_500_010]
    entries = [3, 2, 6, 1, 0, 5, 4]
    for entry, time in zip(entries, times, strict=True):
        service.step(time, messages([(1, entry, time)]), unwritable=stuck)
    back = service.step(90_000_000, reinstated={TOPIC}, **resumed(concat(service.stored), "b"))
    assert [entry for entry, _ in handed_out(back)] == entries


def test_what_is_held_back_can_be_cancelled_and_what_is_open_can_not() -> None:
    service = Service()
    rows = messages([(1, 0, 5), (1, 1, 30)])
    service.step(10, rows)
    stuck: dict[str, Any] = {"b": {"open": [[1, 0]]}}
    service.step(30, confirmed=1, unwritable=stuck)
    requests = commands([command(f"r{entry}", 1, entry, [1]) for entry in (0, 1)])
    effects = service.step(
        31,
        confirmed=2,
        unwritable=stuck,
        commands=requests,
        request_ids={"r0": 0, "r1": 0},
        known_messages=rows.select(KNOWN.names),
    )
    results = dict(zip(effects.outcomes["entry_id"].to_pylist(), effects.outcomes["result"].to_pylist(), strict=True))
    assert results == {0: Result.TOO_LATE, 1: Result.APPLIED}
    assert handed_out(service.step(32, reinstated={TOPIC}, **resumed(concat(service.stored), "b"), confirmed=2)) == []


def test_one_that_is_paused_too_stays_so() -> None:
    service = Service()
    stuck: dict[str, Any] = {"b": {"open": []}}
    service.step(0, messages([(1, 0, 5)]), unwritable=stuck)
    pause = commands([])
    service.step(
        1, unwritable=stuck, commands=pause, request_ids={"p": 0}, pause_changes=[PauseChange("p", TOPIC, 2, True)]
    )
    service.step(5, unwritable=stuck)
    assert handed_out(service.step(6, reinstated={TOPIC}, **resumed(concat(service.stored), "b"))) == []
    assert positions(select_parked(concat(service.stored))) == [(1, 0)]


REJECTS = {"b": {"open": [[1, 0]], "rejects": "b's topic can't be written: terminated"}}
REASON = "not delivered to b: b's topic can't be written: terminated"


def rejected(effects: Effects) -> list[int]:
    """Entries that go to the topic of rejects; the table has the same, and they are cancelled for b."""
    rows = [row for release in effects.releases for row in release.rows.to_pylist() if row["reason"] is not None]
    assert {(row["subscription_mask"], row["reason"]) for row in rows} <= {(0, REASON)}
    entries = [row["entry_id"] for row in rows]
    assert sorted(effects.rejects["entry_id"].to_pylist()) == sorted(entries)
    outcomes = effects.outcomes.to_pylist()
    assert sorted(outcome["entry_id"] for outcome in outcomes) == sorted(entries)
    assert {(o["subscription"], o["result"], o["operation"], o["sequence"] is None) for o in outcomes} <= {
        ("b", Result.APPLIED, "CANCEL", False)
    }
    return entries


@pytest.mark.parametrize("confirmed", [1, 0])
def test_what_is_rejected_after_a_while_is_what_was_handed_out_held_back_and_comes_due(confirmed: int) -> None:
    service = Service()
    assert handed_out(service.step(10, messages([(1, 0, 5), (1, 1, 30), (1, 2, 40), (1, 3, 50)]))) == [(0, 3)]
    stuck: dict[str, Any] = {"b": {"open": [[1, 0]]}}
    assert handed_out(service.step(30, confirmed=confirmed, unwritable=stuck)) == [(1, 1)]

    effects = service.step(
        40,
        confirmed=confirmed,
        unwritable=REJECTS,
        reinstated={TOPIC},
        **resumed(concat(service.stored), "b"),
    )
    assert sorted(rejected(effects)) == [0, 1, 2]
    assert [pair for pair in handed_out(effects) if pair[1]] == [(2, 1)]
    # The offset may go on naming the release for a while, and another run may begin.
    effects = service.step(45, confirmed=confirmed, unwritable=REJECTS)
    assert (rejected(effects), handed_out(effects)) == ([], [])
    effects = service.step(46, confirmed=4, unwritable=REJECTS, run_id="run2")
    assert (rejected(effects), handed_out(effects)) == ([], [])
    assert rejected(service.step(50, confirmed=5, unwritable={"b": {**REJECTS["b"], "open": []}})) == [3]
    assert handed_out(service.step(60, messages([(1, 4, 55)]), confirmed=7)) == [(4, 3)]


def test_what_others_want_of_a_release_keeps_its_places_when_the_rest_is_rejected() -> None:
    service = Service()
    service.step(10, messages([(1, 0, 5), (1, 1, 6)]))
    service.step(11, unwritable=REJECTS)
    again = service.step(12, unwritable=REJECTS, run_id="run2")
    release = next(release for release in again.releases if release.tick == 1)
    rows = release.rows.to_pylist()
    assert [(row["entry_id"], row["subscription_mask"], row[PLACE]) for row in rows] == [(0, 1, 0), (1, 1, 1)]


def test_what_is_cancelled_or_paused_is_not_rejected() -> None:
    service = Service()
    rows = messages([(1, 0, 5), (1, 1, 6)])
    requests = commands([command("r", 1, 0, [1])])
    service.step(0, rows, commands=requests, request_ids={"r": 0})
    assert rejected(service.step(5, unwritable={"b": {**REJECTS["b"], "open": []}})) == []
    pause = [PauseChange("p", TOPIC, 2, True)]
    effects = service.step(
        6,
        unwritable={"b": {**REJECTS["b"], "open": []}},
        commands=commands([]),
        request_ids={"p": 0},
        pause_changes=pause,
    )
    assert rejected(effects) == []


def test_while_the_topic_of_rejects_is_unwritable_the_table_alone_has_them_and_nothing_grows() -> None:
    service = Service()
    bad = with_columns(messages([(1, 0, 5), (1, 1, 5)]), reason=pa.array(["bad", None]))
    assert sorted(handed_out(service.step(10, bad))) == [(0, 0), (1, 3)]
    stuck: dict[str, Any] = {"": {"open": [[1, 0]]}}
    rejects: list[pa.Table] = []
    for entry in range(2, 30):
        rows = with_columns(messages([(1, entry, 0)]), reason=pa.array(["bad"]))
        effects = service.step(10 + entry, rows, confirmed=service.tick, unwritable=stuck)
        assert effects.releases == []
        rejects.append(effects.rejects)
        assert effects.rejects["entry_id"].to_pylist() == [entry]
    assert effects.status["in_flight"] == 0
    assert sum("in_flight" in key for key, *_ in service.store.values) <= 2  # the list, and what was open before

    back = service.step(50, confirmed=service.tick, rejected=concat(rejects))
    assert [(row["entry_id"], row["reason"]) for row in back.releases[0].rows.to_pylist()] == [
        (entry, "bad") for entry in range(2, 30)
    ]
    assert back.rejects.num_rows == 0, "the table has them"


def test_while_rejects_are_sent_again_further_ones_go_to_the_table_alone() -> None:
    service = Service()
    bad = [with_columns(messages([(1, entry, 0)]), reason=pa.array(["bad"])) for entry in range(3)]
    first = service.step(10, bad[0], rejected=bad[1], parked_rejects=[TOPIC])
    assert handed_out(first) == [(1, 0)]
    assert first.rejects["entry_id"].to_pylist() == [0]
    last = service.step(11, bad[2], rejected=bad[0], confirmed=1)
    assert sorted(handed_out(last)) == [(0, 0), (2, 0)]
    assert last.rejects["entry_id"].to_pylist() == [2]


RECALLED = {"b": {"open": [], "recalled": [[1, 0]]}}


@pytest.mark.parametrize("confirmed", [0, 1])
def test_of_what_nothing_was_sent_is_held_back_again_can_be_cancelled_and_goes_out_in_order(confirmed: int) -> None:
    service = Service()
    rows = messages([(1, 0, 5), (1, 1, 6), (1, 2, 30)])
    assert handed_out(service.step(10, rows)) == [(0, 3), (1, 3)]
    effects = service.step(30, confirmed=confirmed, unwritable=RECALLED)
    assert handed_out(effects) == [(2, 1)]
    # The offset may go on naming it, and another run may begin: nothing of it is in flight any more.
    effects = service.step(31, confirmed=confirmed, unwritable=RECALLED, run_id="run2")
    assert [pair for pair in handed_out(effects) if pair[1] & 2] == []
    requests = commands([command("r", 1, 1, [1])])
    effects = service.step(
        32,
        confirmed=2,
        unwritable={"b": {"open": []}},
        commands=requests,
        request_ids={"r": 0},
        known_messages=rows.select(KNOWN.names),
    )
    assert effects.outcomes["result"].to_pylist() == [Result.APPLIED]
    back = service.step(33, confirmed=4, reinstated={TOPIC}, **resumed(concat(service.stored), "b"))
    assert handed_out(back) == [(0, 2), (2, 2)]


def test_a_slow_destination_gets_the_first_of_what_waits_while_what_comes_due_goes_on_waiting() -> None:
    service = Service()
    slow: dict[str, Any] = {"b": {"open": [], "round": 1}}
    service.step(0, messages([(1, entry, 10 + entry * 7 % 50) for entry in range(50)]), unwritable=slow)
    for cutoff in range(5, 70, 5):
        service.step(cutoff, unwritable=slow)
    order = sorted(range(50), key=lambda entry: (10 + entry * 7 % 50, entry))
    came: list[int] = []
    for n in range(1, 4):
        due = messages([(2, 100 + n, 70 + 10 * n)])
        # Of what is sealed the first come; none of them is left in the last round, but those that came due since.
        sealed = in_order_of_dues(select_parked(concat(service.stored)))
        waiting = sealed.filter(pa.array([row not in came for row in sealed["entry_id"].to_pylist()], pa.bool_()))
        effects = service.step(
            70 + 10 * n,
            due,
            unwritable=slow,
            drains=20,
            drained=waiting.slice(0, 20),
            rounds={TOPIC: {"b": Round(waiting["was_due"][19].as_py() if waiting.num_rows > 20 else None)}},
        )
        released = [row for release in effects.releases for row in release.rows.to_pylist()]
        came += [row["entry_id"] for row in released if row["subscription_mask"] & 2]
        assert [row["entry_id"] for row in released if row["subscription_mask"] == 1] == [100 + n]
        assert effects.drained == {TOPIC: {"b": (len(came) - 20 * (n - 1), n < 3)}}
    assert came[:50] == order
    assert came[50:] == [101, 102]  # the third comes due after it was asked what waits
    again = service.step(120, unwritable=slow, run_id="run2")
    assert [entry for entry, mask in handed_out(again) if mask & 2][:50] == order


def test_what_is_not_sealed_goes_out_before_sealed_ones_that_were_due_later() -> None:
    service = Service()
    slow: dict[str, Any] = {"b": {"open": [], "round": 1}}
    dues = {entry: 10 + entry for entry in range(10)}
    service.step(0, messages([(1, entry, dues[entry]) for entry in range(0, 10, 2)]), unwritable=slow)
    for cutoff in (20, 25, 30):
        service.step(cutoff, unwritable=slow)
    sealed = in_order_of_dues(select_parked(concat(service.stored)))
    assert sealed["entry_id"].to_pylist() == [0, 2, 4, 6, 8]
    service.step(31, messages([(1, entry, dues[entry]) for entry in range(1, 10, 2)]), unwritable=slow)
    effects = service.step(
        32, unwritable=slow, drains=3, drained=sealed.slice(0, 3), rounds={TOPIC: {"b": Round(dues[4])}}
    )
    assert [entry for entry, mask in handed_out(effects) if mask & 2] == [0, 1, 2, 3, 4]
    assert effects.drained == {TOPIC: {"b": (5, True)}}
    sealed = in_order_of_dues(select_parked(concat(service.stored)))
    left = sealed.filter(pc.greater(sealed["entry_id"], 4))
    effects = service.step(33, unwritable=slow, drains=9, drained=left, rounds={TOPIC: {"b": Round()}})
    assert [entry for entry, mask in handed_out(effects) if mask & 2] == [5, 6, 7, 8, 9]
    assert effects.drained == {TOPIC: {"b": (5, False)}}


def test_what_is_paused_too_is_not_drained() -> None:
    service = Service()
    slow: dict[str, Any] = {"b": {"open": []}}
    service.step(0, messages([(1, 0, 5)]), unwritable=slow)
    service.step(5, unwritable=slow)
    pause = [PauseChange("p", TOPIC, 2, True)]
    service.step(6, unwritable=slow, commands=commands([]), request_ids={"p": 0}, pause_changes=pause)
    effects = service.step(7, unwritable=slow, drains=20, drained=select_parked(concat(service.stored)))
    assert (handed_out(effects), effects.drained) == ([], {TOPIC: {"b": (0, False)}})


def test_what_a_round_has_let_go_goes_out_at_the_place_that_a_rate_gives_it() -> None:
    service = Service()
    service.subscriptions = Subscriptions({TOPIC: NAMES}, shaping={TOPIC: {1: rate(10, burst=1)}})
    slow: dict[str, Any] = {"b": {"open": [], "round": 1}}
    service.step(0, messages([(1, entry, 5) for entry in range(3)]), unwritable=slow)
    service.step(1_000, unwritable=slow)
    parked = select_parked(concat(service.stored))
    came, times = [], []
    for n, drains in enumerate([20, 0, 0, 0]):
        drained = {"drained": parked, "rounds": {TOPIC: {"b": Round()}}} if drains else {}
        effects = service.step(2_000 + 100 * n, unwritable=slow, drains=drains, **drained)
        rows = [row for release in effects.releases for row in release.rows.to_pylist()]
        came += [row["entry_id"] for row in rows]
        times += [row["deliver_at"] for row in rows]
        # A release whose messages were parked before is open where it does not arrive, and is not parked again.
        assert all(row["was_due"] is not None for row in rows)
    assert came == [0, 1, 2]
    assert times[2] - times[1] == times[1] - times[0] == 100
    # Where the destination can't be written at all, and gets no rounds, they are parked, and can be cancelled.
    refused: dict[str, Any] = {"b": {"open": []}}
    service.step(3_000, messages([(2, entry, 2_900) for entry in range(2)]), unwritable=slow)
    service.step(3_050, unwritable=slow, drains=20, rounds={TOPIC: {"b": Round()}})
    assert handed_out(service.step(4_000, unwritable=refused)) == []


def test_nothing_is_drained_before_its_time() -> None:
    """What comes due within the lookahead is held back, too."""
    service = Service()
    slow: dict[str, Any] = {"b": {"open": []}}
    service.step(100, messages([(1, 0, 1_000), (1, 1, 150)]), now=100, unwritable=slow)
    service.step(1_050, now=200, unwritable=slow)
    effects = service.step(1_100, now=300, unwritable=slow, drains=20, drained=select_parked(concat(service.stored)))
    assert handed_out(effects) == [(1, 2), (0, 2)]
    assert effects.releases[0].rows["deliver_at"].to_pylist() == [300, 1_000]
