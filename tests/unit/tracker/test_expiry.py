"""Messages with an end: what is not sent by then expires, once, and never before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.tracker.keyed import Job as KeyedJob
from tests.support.tracker.keyed import keyed
from tests.support.tracker.messages import TOPIC, batches, command, commands, messages, resumed
from tests.support.tracker.recurring import Job, recurring
from tests.support.tracker.shaped_service import START, Service, many, rate
from tracker.commands.kinds import POSTPONE, RESCHEDULE, RETRY
from tracker.due_time import expires_at
from tracker.messages import concat, with_columns
from tracker.schemas import KNOWN, PauseChange

SECOND = 1_000
MINUTE = 60_000


def pause(number: int, is_paused: bool = True, subscriptions: int = 1) -> PauseChange:
    return PauseChange(f"p{number}", TOPIC, subscriptions, is_paused)


def change_pause(service: Service, number: int, is_paused: bool, names: str = "s") -> None:
    bits = sum(1 << "st".index(name) for name in names)
    given = {} if is_paused else resumed(concat(service.sealed), *names)
    service.step(
        300,
        pause_changes=[pause(number, is_paused, bits)],
        request_ids={f"p{number}": 1},
        **given,
    )


def ended(due: int, end: int, entry: int = 0, **columns: object) -> pa.Table:
    return messages([(7, entry, due)], expires_at=end, **columns)


def test_what_the_job_missed_because_it_was_down_expires() -> None:
    service = Service(None)
    service.step(300, concat([ended(START + 20_000, START + 50_000), ended(START + 20_000, START + 500_000, entry=1)]))
    service.run_until(START + 10_000)
    service.run += 1
    service.step(MINUTE)
    assert [(entry, name) for entry, name, _ in service.expired] == [(0, "s"), (0, "t")]
    assert [(row[1], row[2]) for row in service.out] == [(1, "s"), (1, "t")]


def test_a_message_is_sent_until_its_end_and_not_at_it() -> None:
    due = START + 20_000
    for late, is_sent in ((-1, True), (0, False)):
        service = Service(None, shards=1)
        service.step(300, ended(due, due + 5_000))
        service.run += 1
        service.step(due + 5_000 + late - service.now)
        assert bool(service.out) == is_sent
        assert bool(service.expired) != is_sent


def test_one_that_comes_in_after_its_end_expires() -> None:
    service = Service(None)
    service.step(300, ended(START, START + 100))
    assert [(entry, name) for entry, name, _ in service.expired] == [(0, "s"), (0, "t")]
    assert not service.out


def test_a_dispatched_message_does_not_expire_however_often_it_is_sent_again() -> None:
    service = Service(None, shards=1)
    service.step(300, ended(START + 1_000, START + 1_100))
    assert [row[1] for row in service.out] == [0, 0]
    service.run += 1
    service.step(MINUTE)
    assert [row[1] for row in service.again] == [0, 0]
    assert not service.expired


def test_what_is_parked_expires_there_and_is_not_sent_when_the_pause_ends() -> None:
    service = Service(None)
    service.step(300, concat([ended(START + 3_000, START + 20_000, entry=i) for i in range(5)]))
    change_pause(service, 1, True)
    service.run_until(START + 19_500)
    assert not service.expired
    service.run_until(START + 25_000)
    assert sorted(entry for entry, _, _ in service.expired) == [0, 1, 2, 3, 4]
    assert {name for _, name, _ in service.expired} == {"s"}
    assert all(START + 20_000 <= at <= START + 22_500 for *_, at in service.expired)
    change_pause(service, 2, False)
    service.run_until(service.now + 5_000)
    assert {row[2] for row in service.out} == {"t"}
    assert len(service.expired) == 5


def test_what_is_resumed_in_time_is_sent_and_does_not_expire_later() -> None:
    service = Service(None)
    service.step(300, ended(START + 3_000, START + 20_000))
    change_pause(service, 1, True)
    service.run_until(START + 15_000)
    change_pause(service, 2, False)
    service.run_until(START + 30_000)
    assert sorted(row[2] for row in service.out) == ["s", "t"]
    assert not service.expired


def test_a_subscription_has_an_end_of_its_own() -> None:
    service = Service(None, expire_after=2_000)
    service.step(300, many(3, START + 20_000))
    service.run += 1
    service.step(30_000)
    assert {name for _, name, _ in service.expired} == {"s"}
    assert {row[2] for row in service.out} == {"t"}


def test_a_rate_lets_the_rest_expire_and_what_has_expired_takes_no_place() -> None:
    """One a second for ten seconds: ten of a hundred go out, and what comes afterwards goes out at once."""
    for shards in (1, 2):
        service = Service(rate(1.0, burst=1), shards)
        due = START + 5_000
        service.step(300, many(100, due, expires_at=due + 10_000))
        service.run_until(due + 8_000)
        service.step(300, many(1, due + 12_000, first=1_000))
        service.run_until(due + 25_000)
        sent = service.of("s")
        assert 9 <= len(sent) - 1 <= 11, shards
        assert all(at < due + 10_000 for _, entry, _, at, _ in sent if entry < 1_000)
        [[*_, last, _]] = [row for row in sent if row[1] == 1_000]
        assert last <= due + (12_000 if shards == 1 else 19_000)
        assert {entry for entry, _, _ in service.expired} == {*range(100)} - {row[1] for row in sent}
        assert all(at >= due + 10_000 for *_, at in service.expired)


def known(rows: pa.Table) -> dict[str, Any]:
    return {"known_messages": rows.select(KNOWN.names), "payload_rows": rows}


@pytest.mark.parametrize(
    ("properties", "end"),
    [
        ({"expireAfter": "10s"}, START + 50_000 + 10_000),
        ({"expireAt": str(START + 100_000)}, START + 100_000),
        ({"expireAt": str(START + 55_000), "expireAfter": "10s"}, START + 55_000),
    ],
)
@pytest.mark.parametrize("kind", [RESCHEDULE, POSTPONE])
def test_the_end_after_the_time_moves_with_it_and_a_fixed_one_stays(
    kind: str, properties: dict[str, str], end: int
) -> None:
    service = Service(None, shards=1)
    before = expires_at(properties, START + 20_000)
    assert before is not None
    rows = ended(START + 20_000, before, properties=list(properties.items()))
    service.step(300, rows)
    moves_to = START + 50_000 if kind == RESCHEDULE else 30_000
    row = command("r", 7, 0, (0,), -1, moves_to, kind=kind)
    service.step(300, commands=commands([row]), request_ids={"r": 1}, **known(rows))
    service.run_until(START + 8_000)
    [moved] = [one for one in concat(service.sealed).to_pylist() if one["sequence"] is not None]
    assert (moved["deliver_at"], moved["expires_at"]) == (START + 50_000, end)


def test_a_retry_is_not_sent_after_the_end() -> None:
    service = Service(None, shards=1)
    rows = ended(START + 20_000, START + 40_000)
    service.step(300, rows)
    service.run_until(START + 25_000)
    assert len(service.out) == 2
    for number, after in enumerate((5_000, 30_000)):
        row = command(f"r{number}", 7, 0, (number,), -1, kind=RETRY) | {"after_millis": after, "reason": "no"}
        service.step(300, commands=commands([row]), request_ids={f"r{number}": 1}, **known(rows))
    service.run_until(START + 70_000)
    assert [row[2] for row in service.out] == ["s", "t", "s"]
    assert [(entry, name) for entry, name, _ in service.expired] == [(0, "t")]


def test_each_occurrence_has_an_end_of_its_own() -> None:
    """The job stands still for a minute: with `all` the missed occurrences come, but for those that have expired."""
    job = Job()
    job.step(recurring(0, 10 * SECOND, "@every 10s", misfire="all", expireAfter="25s"), later=SECOND)
    for _ in range(12):
        job.step()
    effects = [job.step(later=MINUTE), *(job.step() for _ in range(5))]
    due = [at for _, _, at in job.got["a"]]
    assert due[:2] == [10_000, 50_000]
    assert due == sorted(set(due))
    gone = [row for one in effects for row in one.outcomes.to_pylist()]
    assert [(row["occurrence"], row["deliver_at"]) for row in gone if row["subscription"] == "a"] == [
        (2, 20_000),
        (3, 30_000),
        (4, 40_000),
    ]
    assert {row["operation"] for row in gone} == {"SKIP_NEXT"}


def test_an_occurrence_that_is_parked_expires_there_and_the_next_one_comes() -> None:
    job = Job()
    job.step(recurring(0, 10 * SECOND, "@every 60s", expireAfter="20s"), later=SECOND)
    job.step(pause=PauseChange("p1", TOPIC, 1, True))
    outcomes = []
    for _ in range(50):
        outcomes += job.step().outcomes.to_pylist()
    assert [(row["occurrence"], row["subscription"]) for row in outcomes] == [(1, "a")]
    job.step(pause=PauseChange("p2", TOPIC, 1, False))
    for _ in range(20):
        job.step()
    assert [one[1:] for one in job.got["a"]] == [(2, 70_000)]
    assert [one[1:] for one in job.got["b"]] == [(1, 10_000), (2, 70_000)]


@pytest.mark.parametrize(("lookahead", "misfire"), [(0, "all"), (5_000, "all"), (5_000, "skip"), (0, "once")])
def test_a_parked_occurrence_that_expires_late_does_not_end_the_message(lookahead: int, misfire: str) -> None:
    """The next occurrence is due in the tick in which the parked one expires."""
    job = Job(lookahead=lookahead)
    job.step(recurring(0, 10 * SECOND, "@every 60s", misfire=misfire, expireAfter="20s"), later=SECOND)
    job.step(pause=PauseChange("p1", TOPIC, 1, True))
    job.run(10)
    job.step(later=3 * MINUTE)
    job.step(pause=PauseChange("p2", TOPIC, 1, False))
    job.run(150)
    assert job.times()[-2:] == [250, 310]


def test_an_expired_parked_message_says_the_end_that_it_had_when_it_was_parked() -> None:
    """The subscription has no `expire_after` any more."""
    service = Service(None, shards=1, expire_after=2_000)
    service.step(300, many(1, START + 3_000))
    change_pause(service, 1, True)
    service.run_until(START + 4_000)
    service.subscriptions = dataclasses.replace(service.subscriptions, expire_after={})
    reasons: list[str] = []
    for _ in range(30):
        reasons += [row["reason"] for one in service.step(300) for row in one.outcomes.to_pylist()]
    assert reasons == [f"not sent by {START + 5_000}"]


@pytest.mark.parametrize(("rule", "end"), [({"expireAfter": "2s"}, 10_000), ({"expireAt": "30000"}, 30_000)])
def test_a_debounced_message_expires_after_the_time_that_it_is_capped_to(rule: dict[str, str], end: int) -> None:
    job = KeyedJob(1)
    for entry, published in ((0, 0), (1, 4_000)):
        due = published + 6_000
        row = keyed(entry, "k", due, published, -1, 1, scheduleMode="debounce", debounceMax="8s", **rule)
        job.step(with_columns(row, expires_at=pa.array([expires_at(rule, due)])), later=published)
    job.step(later=100)
    [last] = [row for row in job.sealed.to_pylist() if row["entry_id"] == 64]
    assert (last["deliver_at"], last["expires_at"]) == (8_000, end)


def test_many_that_are_parked_expire_tick_by_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracker.ends.MOST_ENDED", 2)
    service = Service(None, shards=1)
    due = [START + 3_000 + 1_000 * i for i in range(6)]
    service.step(300, concat([ended(one, START + 21_000 + 4_000 * (i == 5), entry=i) for i, one in enumerate(due)]))
    change_pause(service, 1, True)
    service.run_until(START + 20_000)
    numbers = [sum(one.status["expired"] for one in service.step(300)) for _ in range(40)]
    assert max(numbers) == 2
    assert sorted(entry for entry, _, _ in service.expired) == [0, 1, 2, 3, 4, 5]
    assert [at >= START + 25_000 for entry, _, at in service.expired if entry == 5] == [True]


def test_of_a_batch_each_message_has_its_end() -> None:
    service = Service(None, shards=1)
    rows = batches([(7, 0, i, 3, START + 20_000) for i in range(3)])
    rows = rows.set_column(
        rows.schema.get_field_index("expires_at"), "expires_at", pa.array([START + 21_000, None, START + 90_000])
    )
    service.step(300, rows)
    service.run += 1
    service.step(40_000)
    assert len(service.out) == 4
    assert len(service.expired) == 2


@effort(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_message_is_dispatched_or_expires_once_whatever_happens(data: st.DataObject) -> None:
    """With rates, pauses, standstills and restarts."""
    messages_per_second = data.draw(st.sampled_from([None, 1.0, 5.0]), "rate")
    service = Service(
        None
        if messages_per_second is None
        else rate(messages_per_second, data.draw(st.sampled_from([None, 1]), "burst")),
        data.draw(st.integers(1, 3), "shards"),
        expire_after=data.draw(st.sampled_from([None, 4_000, 20_000]), "expire_after"),
    )
    ends: dict[tuple[int, str], int | None] = {}
    expire_after = service.subscriptions.expire_after.get(TOPIC, {}).get(0)
    paused: set[str] = set()
    for number in range(data.draw(st.integers(3, 25), "steps")):
        action = data.draw(st.sampled_from(["come", "come", "pause", "resume", "pass", "stand still", "restart"]))
        if action == "come":
            delay = data.draw(st.integers(-500, 15_000), "delay")
            after = data.draw(st.sampled_from([None, 300, 3_000, 12_000, 40_000]), "after")
            due = service.now + 300 + delay
            end = None if after is None else due + after
            n = data.draw(st.integers(1, 12), "n")
            for entry in range(100 * number, 100 * number + n):
                of_s = [one for one in (end, None if expire_after is None else due + expire_after) if one is not None]
                ends |= {(entry, "s"): min(of_s, default=None), (entry, "t"): end}
            service.step(300, many(n, due, first=100 * number, expires_at=end))
        elif action in ("pause", "resume"):
            name = data.draw(st.sampled_from("st"), "name")
            if (name in paused) == (action == "resume"):
                change_pause(service, number, action == "pause", name)
                paused ^= {name}
        elif action == "pass":
            service.run_until(
                service.now + data.draw(st.integers(1, 10_000), "for"), data.draw(st.sampled_from([300, 900]))
            )
        elif action == "stand still":
            service.step(data.draw(st.integers(1_000, 60_000), "still for"))
        else:
            service.run += 1
            service.step(300)
    for name in sorted(paused):
        change_pause(service, 1_000 + ord(name), False, name)
    service.run_until(service.now + 120_000, 900)
    sent = [(entry, name) for _, entry, name, *_ in service.out]
    gone = [(entry, name) for entry, name, _ in service.expired]
    assert sorted([*sent, *gone]) == sorted(ends)
    for entry, name, at in service.expired:
        end = ends[entry, name]
        assert end is not None
        assert at >= end
    for _, entry, name, at, _ in service.out:
        end = ends[entry, name]
        assert end is None or at < end, "it is given to its sender before its end"
