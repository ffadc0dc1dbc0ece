"""Retries: their numbers, times and reasons, what is refused, and that each is sealed at once."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tracker.messages import TOPIC, Answers, command, commands, messages, tick_at
from tracker.commands.decide import NOT_KEPT
from tracker.commands.kinds import POSTPONE, RETRY, SKIP
from tracker.due_time import BadScheduleError
from tracker.messages import concat
from tracker.properties import sent_back, with_reason
from tracker.schemas import KNOWN, PauseChange
from tracker.shard import Shard
from tracker.store import MemoryStore
from tracker.subscriptions import Backoff, Subscriptions
from tracker.tick import Effects, TickInput
from tracker.wire.delaylake_pb2 import Result

BACKOFF = Backoff(first_millis=2_000, factor=3.0, max_millis=10_000, jitter=0.0, attempts=3)

# What is recorded with a release of how it is sent.
SENDING = json.dumps({"attempts": {TOPIC: {"a": 3, "b": 3}}})


class Job:
    """A shard with one message, which has been sealed, and what its tables would have."""

    def __init__(self, due: int = 20_000) -> None:
        self.shard = Shard(
            MemoryStore(), Subscriptions({TOPIC: ["a", "b"]}, backoffs={TOPIC: {0: BACKOFF, 1: BACKOFF}}), 1_000
        )
        self.number = self.loaded = 0
        self.answers = Answers()
        self.index: list[pa.Table] = []
        self.sent: list[tuple[int, int, int | None]] = []
        self.tick(1_000, messages=messages([(1, 7, due)], payload=b"buy"))

    def tick(
        self, now: int, confirmed: int = 0, unwritable: Mapping[str, Any] | None = None, **tick_input: Any
    ) -> Effects:
        self.number += 1
        given = TickInput(segment=self.due(now), first_answers=self.answers, **tick_input)
        tick = tick_at(self.number, now, load_horizon=now + 6_000, near_until=now + 2_000, ingested_through=self.number)
        tick = replace(tick, confirmed=confirmed, unwritable=unwritable or {}, sending=SENDING)
        effects = self.shard.apply(tick, given)
        self.loaded = now + 6_000
        self.index.append(effects.bucket)
        self.answers.keep(effects.outcomes, self.number)
        return effects

    def due(self, now: int) -> pa.Table:
        rows, since = concat(self.index), self.loaded
        return rows.filter(pa.array([since <= due < now + 6_000 for due in rows["deliver_at"].to_pylist()], pa.bool_()))

    def command(self, now: int, request_id: str, kind: str = RETRY, **others: object) -> dict[str, Any]:
        row = command(request_id, 1, 7, kind=kind) | {"reason": f"why {request_id}"} | others
        rows = concat(self.index)
        known = rows.filter(pc.is_null(rows["sequence"])).select(KNOWN.names)
        effects = self.tick(
            now, commands=commands([row]), request_ids={request_id: 1}, known_messages=known, payload_rows=rows
        )
        [outcome] = effects.outcomes.to_pylist()
        self.sent = self.rows(effects)
        return outcome

    @staticmethod
    def rows(effects: Effects) -> list[tuple[int, int, int | None]]:
        """Of what is handed out the subscriptions, the time and the attempt."""
        return [
            (row["subscription_mask"], row["deliver_at"], row["attempt"])
            for release in effects.releases
            for row in release.rows.to_pylist()
        ]


def test_retries_are_numbered_and_wait_longer_each_time() -> None:
    job = Job()
    assert job.rows(job.tick(20_000)) == [(0b11, 20_000, None)]
    now, found = 21_000, []
    for number in range(1, 6):
        outcome = job.command(now, f"r{number}")
        assert (outcome["result"], outcome["attempt"], outcome["reason"]) == (Result.APPLIED, number, f"why r{number}")
        found.append(outcome["deliver_at"] - now)
        again = job.command(now + 1, f"again{number}") if outcome["deliver_at"] > now + 2_000 else None
        assert again is None or (again["result"], again["reason"]) == (Result.ALREADY_APPLIED, "it waits")
        sent = job.sent + job.rows(job.tick(now + 10_001))
        assert sent == [(0b01, outcome["deliver_at"], number)], "to the one subscription, once"
        now += 20_000
    # The fourth and fifth are beyond the limit: they go to the dead letters, at once.
    assert found == [2_000, 6_000, 10_000, 0, 0]
    [*_, last] = [row for row in concat(job.index).to_pylist() if row["attempt"]]
    assert json.loads(last["retry_reasons"]) == [f"why r{number}" for number in range(1, 6)]
    assert last["payload"] == b"buy"


def test_each_retry_is_sealed_in_its_tick_also_where_it_is_due_soon() -> None:
    job = Job()
    job.tick(20_000)
    outcome = job.command(20_500, "r", after_millis=1_500)
    assert outcome["deliver_at"] == 22_000
    assert [(r["attempt"], r["deliver_at"]) for r in job.index[-1].to_pylist()] == [(1, 22_000)]
    assert job.rows(job.tick(22_000)) == [(0b01, 22_000, 1)]
    assert job.shard._tracker.number_of_delayed_messages - job.shard._state.unwanted == 0


def test_a_message_that_waits_or_that_no_table_keeps_is_not_retried() -> None:
    job = Job()
    assert job.command(2_000, "early")["result"] == Result.ALREADY_APPLIED
    assert job.rows(job.tick(20_000)) == [(0b11, 20_000, None)]
    row = concat(job.index).select(KNOWN.names).to_pylist()[0]
    unsealed = pa.Table.from_pylist([row | {"deliver_at": 0}], schema=KNOWN)
    job.index.clear()
    row = command("r", 1, 7, kind=RETRY)
    [outcome] = job.tick(
        21_000, commands=commands([row]), request_ids={"r": 1}, known_messages=unsealed
    ).outcomes.to_pylist()
    assert (outcome["result"], outcome["reason"]) == (Result.NOT_FOUND, NOT_KEPT)


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("due", [1_000, 1_500])  # at once; before the end of the seal epoch
def test_what_was_due_at_once_is_retried_too(is_sealed: bool, due: int) -> None:
    shard = Job().shard
    shard = Shard(MemoryStore(), shard._context.subscriptions, 1_000)

    def tick(number: int, cutoff: int, **given: Any) -> Effects:
        epoch = 2 if number > 2 and is_sealed else 1
        return shard.apply(
            tick_at(number, cutoff, seal_epoch=epoch, load_horizon=9_000, near_until=8_000), TickInput(**given)
        )

    tick(1, 900)
    effects = [tick(2, 1_000, messages=messages([(1, 7, due)], payload=b"buy")), tick(3, 1_600)]
    assert [row for one in effects for row in Job.rows(one)] == [(0b11, due, None)]
    sealed = concat(one.bucket for one in effects)
    assert sealed["payload"].to_pylist() == [b"buy"] * is_sealed
    row = command("r", 1, 7, kind=RETRY) | {"after_millis": 900}
    asked = tick(4, 1_700, commands=commands([row]), request_ids={"r": 1}, payload_rows=sealed)
    [outcome] = asked.outcomes.to_pylist()
    assert (outcome["result"], outcome["attempt"]) == (Result.APPLIED, 1)
    assert Job.rows(tick(5, 2_600)) == [(0b01, 2_600, 1)]
    # With the retry it is in the index, once, and waits for nothing.
    index = concat([sealed, asked.bucket])
    assert [row["payload"] for row in index.to_pylist() if row["sequence"] is None] == [b"buy"]
    assert shard._tracker.number_of_delayed_messages - shard._state.unwanted == 0


def test_without_a_backoff_what_was_due_at_once_is_not_kept() -> None:
    shard = Shard(MemoryStore(), {TOPIC: ["a"]}, 1_000)
    come = [messages([]), messages([(1, 7, 1_000), (1, 8, 1_001)]), messages([])]
    ticks = [tick_at(n + 1, 900 + 100 * n, load_horizon=9_000, near_until=8_000) for n in range(3)]
    effects = [shard.apply(tick, TickInput(messages=m)) for tick, m in zip(ticks, come, strict=True)]
    assert sum(release.rows.num_rows for one in effects for release in one.releases) == 2
    assert concat(one.bucket for one in effects).num_rows == 0
    row = command("r", 1, 7, kind=RETRY)
    [outcome] = shard.apply(tick_at(4, 4_000), TickInput(commands=commands([row]))).outcomes.to_pylist()
    assert (outcome["result"], outcome["reason"]) == (Result.NOT_FOUND, NOT_KEPT)


def test_a_retry_that_waits_is_skipped_and_asked_for_again() -> None:
    job = Job()
    job.tick(20_000)
    assert job.command(21_000, "r1", after_millis=9_000)["result"] == Result.APPLIED
    assert job.command(22_000, "s", kind=SKIP)["result"] == Result.APPLIED
    refused = job.command(23_000, "r2")
    assert (refused["result"], refused["reason"]) == (Result.INVALID, "cancelled: restore it first")
    assert job.rows(job.tick(30_000)) == []
    again = job.command(31_000, "r3", after_millis=500)
    assert (again["result"], again["attempt"]) == (Result.APPLIED, 2)
    assert job.sent + job.rows(job.tick(32_000)) == [(0b01, 31_500, 2)]


def test_a_retry_that_is_put_off_in_the_tick_in_which_it_is_asked_for_stays_a_retry() -> None:
    job = Job()
    job.tick(20_000)
    rows = concat(job.index)
    known = rows.filter(pc.is_null(rows["sequence"])).select(KNOWN.names)
    given = [
        command("r", 1, 7, kind=RETRY) | {"reason": "why"},
        command("p", 1, 7, kind=POSTPONE) | {"deliver_at": 5_000},
    ]
    effects = job.tick(
        21_000, commands=commands(given), request_ids={"r": 1, "p": 1}, known_messages=known, payload_rows=rows
    )
    assert [outcome["result"] for outcome in effects.outcomes.to_pylist()] == [Result.APPLIED] * 2
    assert job.rows(job.tick(27_000)) == []
    assert job.rows(job.tick(28_000)) == [(0b01, 28_000, 1)]
    last = max(concat(job.index).to_pylist(), key=lambda row: row["sequence"] or 0)
    assert (last["attempt"], json.loads(last["retry_reasons"])) == (1, ["why"])


def test_under_one_request_id_there_is_one_retry() -> None:
    job = Job()
    job.tick(20_000)
    assert job.command(21_000, "same", after_millis=1_000)["attempt"] == 1
    assert job.rows(job.tick(22_000)) == [(0b01, 22_000, 1)]
    rows = concat(job.index)
    row = command("same", 1, 7, kind=RETRY)
    effects = job.tick(23_000, commands=commands([row]), request_ids={"same": 1}, payload_rows=rows)
    assert [(r["is_repeat"], r["result"]) for r in effects.outcomes.to_pylist()] == [(True, Result.APPLIED)]
    assert job.rows(effects) == []
    assert job.rows(job.tick(40_000)) == []


@given(
    first=st.integers(1, 10**10),
    factor=st.floats(1, 100),
    longest=st.integers(1, 10**10),
    jitter=st.floats(0, 1),
    attempt=st.integers(1, 1_000),
)
def test_a_wait_is_within_its_limits(first: int, factor: float, longest: int, jitter: float, attempt: int) -> None:
    backoff = Backoff(min(first, longest), factor, longest, jitter)
    wait = backoff.wait_millis(attempt, "7:0:3 billing")
    assert wait == backoff.wait_millis(attempt, "7:0:3 billing")
    grown = math.exp(min((attempt - 1) * math.log(factor), 60))  # the longest is far below e^60 times the first
    naive = min(backoff.first_millis * grown, longest)
    assert naive * (1 - jitter) - 1 <= wait <= min(naive * (1 + jitter) + 1, longest)


def test_jitter_spreads_the_messages() -> None:
    waits = {Backoff(jitter=0.5).wait_millis(1, f"7:{entry}:0 billing") for entry in range(1_000)}
    assert 5_000 <= min(waits) < 5_200
    assert 14_800 < max(waits) <= 15_000
    assert len(waits) > 900


@pytest.mark.parametrize("reason", ["x" * 1_000])
def test_of_very_many_reasons_the_last_are_kept(reason: str) -> None:
    kept = json.loads(with_reason(json.dumps([reason] * 50), "the last"))
    assert kept[-1] == "the last"
    assert 2 <= len(kept) < 10


@pytest.mark.parametrize("so_far", ["[" + "1," * 20_000 + "1]", "[" + "1," * 2_000_000 + "1]", "[" * 1_000_000])
def test_what_a_message_says_its_reasons_are_takes_no_time_however_long_it_is(so_far: str) -> None:
    began = time.process_time()
    kept = json.loads(with_reason(so_far, "the last"))
    assert kept[-1] == "the last"
    assert set(kept[:-1]) <= {"1"}
    assert time.process_time() - began < 1, "20,000 took half a minute, in which no topic was read"


SENT_BACK = {"retryOf": "1:7:-1:-1", "retrySubscription": "b", "retryReason": "no"}


def sent_back_row(entry: int, **others: str) -> pa.Table:
    properties = SENT_BACK | others
    read = sent_back(properties)
    columns = {"attempt": read.attempt, "retry_reasons": read.reasons, "properties": list(properties.items())}
    return messages([(2, entry, 30_000)], payload=b"again", **columns)


def test_what_is_sent_back_comes_after_its_backoff_to_its_subscription_alone() -> None:
    job = Job()
    job.tick(20_000)
    again = {"delaylake.attempt": "1", "delaylake.reasons": '["first"]'}
    effects = job.tick(30_000, messages=concat([sent_back_row(0), sent_back_row(1, **again, retryAfter="9s")]))
    told = {(o["entry_id"], o["subscription"], o["operation"], o["result"]) for o in effects.outcomes.to_pylist()}
    skipped = {(e, name, "SKIP", Result.APPLIED) for e in (0, 1) for name in ("a", "*")}
    assert told == skipped | {(e, "b", "SENT_BACK", Result.APPLIED) for e in (0, 1)}
    names = ("attempt", "reason", "deliver_at", "retry_of", "request_id", "issued_by")
    assert [tuple(o[name] for name in names) for o in effects.outcomes.to_pylist()[:2]] == [
        (1, "no", 32_000, "1:7:-1:-1", "retryOf", "delaylake"),
        (2, "no", 39_000, "1:7:-1:-1", "retryOf", "delaylake"),
    ]
    assert job.rows(job.tick(32_000)) == [(0b10, 32_000, 1)]
    assert job.rows(job.tick(38_999)) == []
    assert job.rows(job.tick(39_000)) == [(0b10, 39_000, 2)]
    [second] = [row for row in concat(job.index).to_pylist() if (row["ledger_id"], row["entry_id"]) == (2, 1)]
    assert json.loads(second["retry_reasons"]) == ["first", "no"]
    assert job.shard._tracker.number_of_delayed_messages - job.shard._state.unwanted == 0


def test_one_that_was_sent_back_too_often_is_a_dead_letter_at_once() -> None:
    job = Job(due=90_000)
    dead = sent_back_row(0, **{"delaylake.attempt": "3"}, retryAfter="1h")
    assert job.rows(job.tick(30_000, messages=dead)) == [(0b10, 30_000, 4)]


def test_the_attempts_of_what_is_re_driven_begin_anew() -> None:
    job = Job(due=90_000)
    asked = {"redriveRequest": "r1", "redriveBy": "ops", "retryAfter": "no time"}
    redriven = sent_back_row(0, **asked | {"delaylake.attempt": "4", "delaylake.reasons": '["no"]'})
    effects = job.tick(30_000, messages=redriven)
    assert job.rows(effects) == [(0b10, 30_000, None)]
    assert job.index[-1]["attempt"].to_pylist() == [None]
    [told] = [o for o in effects.outcomes.to_pylist() if o["operation"] == "REDRIVE"]
    # Anybody who may produce can write the property, so that the issuer is not who it says.
    named = {"issued_by": "delaylake", "reason": "re-driven, as the message says, by ops"}
    assert told | {"request_id": "redrive-r1", "subscription": "b", "attempt": None, **named} == told
    assert told["retry_of"] == "1:7:-1:-1"


def test_what_was_sent_back_and_comes_again_is_told_once() -> None:
    job = Job()
    assert "SENT_BACK" in job.tick(30_000, messages=sent_back_row(0)).outcomes["operation"].to_pylist()
    again = job.tick(30_500, messages=sent_back_row(0))
    assert "SENT_BACK" not in again.outcomes["operation"].to_pylist()


def test_what_is_sent_back_for_nobody_is_rejected() -> None:
    job = Job()
    effects = job.tick(30_000, messages=sent_back_row(0, retrySubscription="c"))
    assert effects.rejects["reason"].to_pylist() == ["retrySubscription: the topic has no subscription 'c'"]
    assert effects.outcomes.num_rows == 0


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"retryOf": "7"}, "retryOf is no message's id, ledger:entry:partition:batchIndex: '7'"),
        ({"retryOf": "7:0:x:-1"}, "retryOf is no message's id, ledger:entry:partition:batchIndex: '7:0:x:-1'"),
        ({"retrySubscription": ""}, "retrySubscription is missing: the subscription whose consumer failed"),
        ({"retryAfter": "soon"}, "retryAfter is no duration above 0, as 90s, 5m, 2h, 1d or milliseconds: 'soon'"),
        ({"retryAfter": "400d"}, "retryAfter is more than 366 days: 400d"),
        ({"redriveRequest": "r" * 257}, "redriveRequest has more than 256 bytes"),
        ({"redriveRequest": "r", "redriveBy": "\u00fc" * 513}, "redriveBy has more than 1,024 bytes"),
    ],
)
def test_what_is_wrong_with_it_is_named(properties: dict[str, str], reason: str) -> None:
    with pytest.raises(BadScheduleError) as raised:
        sent_back(SENT_BACK | properties)
    assert str(raised.value) == reason


@given(st.dictionaries(st.sampled_from(["retryReason", "delaylake.attempt", "delaylake.reasons"]), st.text()))
def test_what_else_it_has_is_read_as_far_as_it_can_be(properties: dict[str, str]) -> None:
    read = sent_back(SENT_BACK | properties)
    assert 1 <= read.attempt <= 10_000
    assert json.loads(read.reasons or "")[-1] == properties.get("retryReason", "no")[:1_000]


def test_dead_letters_that_can_not_be_written_are_open_and_hold_nothing_back() -> None:
    job = Job(due=90_000)
    dead = sent_back_row(0, **{"delaylake.attempt": "3"})
    assert job.rows(job.tick(30_000, messages=dead)) == [(0b10, 30_000, 4)]

    def tick(now: int, given: TickInput, **others: Any) -> Effects:
        job.number += 1
        unwritable = {TOPIC: {"b dlq": {"since": 1, "open": [[2, False]]}}}
        at = tick_at(job.number, now, load_horizon=now + 6_000, near_until=now + 2_000, ingested_through=job.number)
        return job.shard.apply(replace(at, confirmed=2, unwritable=unwritable, sending=SENDING, **others), given)

    at_once = messages([(3, 0, 30_000)])
    again = tick(31_000, TickInput(messages=concat([at_once, sent_back_row(1, retryAfter="1ms")])))
    assert job.rows(again) == [(0b11, 30_000, None)]
    assert job.rows(tick(31_500, TickInput())) == [(0b10, 31_001, 1)]
    # Another run hands out again what is open of it.
    [first, *_] = tick(32_000, TickInput(), run_id="another").releases
    assert [(row["attempt"], row["place"]) for row in first.rows.to_pylist()] == [(4, 0)]


def test_dead_letters_that_have_arrived_are_not_rejected_with_the_others_of_their_release() -> None:
    job = Job(due=90_000)
    others = concat([messages([(3, 0, 30_000)]), sent_back_row(1, **{"delaylake.attempt": "2", "retryAfter": "1ms"})])
    dead = sent_back_row(0, **{"delaylake.attempt": "3"})
    assert job.rows(job.tick(30_000, messages=concat([dead, others]))) == [(0b10, 30_000, 4), (0b11, 30_000, None)]
    assert job.rows(job.tick(30_500)) == [(0b10, 30_001, 3)]
    opened = [[number, kind] for number in (2, 3) for kind in (0, 1)]
    stuck = {TOPIC: {"b": {"since": 1, "open": opened, "rejects": "b's topic can't be written: terminated"}}}
    effects = job.tick(31_000, confirmed=3, unwritable=stuck)
    assert sorted(effects.rejects["entry_id"].to_pylist()) == [0, 1]
    assert {row["attempt"] for row in effects.rejects.to_pylist()} == {None, 3}


@pytest.mark.parametrize("is_rejected", [False, True])
def test_dead_letters_go_out_where_only_the_destination_of_the_others_can_not_be_written(is_rejected: bool) -> None:
    job = Job(due=90_000)
    rejects = {"rejects": "b's topic can't be written: terminated"} if is_rejected else {}
    stuck = {TOPIC: {"b": {"since": 1, "open": []} | rejects}}
    dead = sent_back_row(0, **{"delaylake.attempt": "3"})
    effects = job.tick(30_000, messages=concat([dead, messages([(3, 0, 30_000)])]), unwritable=stuck)
    assert job.rows(effects)[:2] == [(0b10, 30_000, 4), (0b01, 30_000, None)]
    assert effects.rejects["ledger_id"].to_pylist() == [3] * is_rejected
    pause = PauseChange("p", TOPIC, 0b10, is_paused=True)
    again = sent_back_row(1, **{"delaylake.attempt": "3"})
    effects = job.tick(31_000, messages=again, unwritable=stuck, pause_changes=[pause], request_ids={"p": 1})
    assert job.rows(effects) == []


@pytest.mark.parametrize("is_rejected", [False, True])
def test_a_retry_that_is_asked_for_before_its_delivery_is_known_to_be_open_is_not_lost(is_rejected: bool) -> None:
    job = Job()
    job.tick(20_000)
    assert job.command(21_000, "r", after_millis=5_000)["result"] == Result.APPLIED
    rejects = {"rejects": "a's topic can't be written: terminated"} if is_rejected else {}
    stuck = {TOPIC: {"a": {"since": 1, "open": [[2, 1]]} | rejects}}
    effects = job.tick(22_000, confirmed=2, unwritable=stuck)
    assert effects.outcomes.num_rows == effects.rejects.num_rows == 0
    # Neither do the tables have a row that comes after the retry.
    last = max(concat(job.index).to_pylist(), key=lambda row: row["sequence"] or 0)
    assert (last["attempt"], last["deliver_at"]) == (1, 26_000)
    assert job.rows(job.tick(26_000, confirmed=3)) == [(0b01, 26_000, 1)]
    assert job.shard._tracker.number_of_delayed_messages - job.shard._state.unwanted == 0


def test_a_retry_that_is_open_itself_is_kept_in_the_tables() -> None:
    job = Job()
    job.tick(20_000)
    job.command(21_000, "r", after_millis=1)
    assert job.sent == [(0b01, 21_001, 1)] or job.rows(job.tick(21_001)) == [(0b01, 21_001, 1)]
    opened = [[number, kind] for number in range(2, job.number + 1) for kind in (0, 1)]
    job.tick(22_000, confirmed=job.number, unwritable={TOPIC: {"a": {"since": 1, "open": opened}}})
    [kept] = job.index[-1].to_pylist()
    assert (kept["attempt"], kept["subscription"], kept["deliver_at"]) == (1, "a", 21_001)
