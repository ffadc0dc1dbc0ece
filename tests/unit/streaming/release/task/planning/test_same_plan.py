"""The planner in columns returns what the naive one does, row by row.

Sequence ids, producers' names and the ends of batches must never change: a release that an earlier program has sent is
sent again by this one, and the broker drops what it has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from broker.client import PulsarError
from conf.settings import Settings
from streaming.checkpoint.offset import UNKNOWN
from streaming.release.attempt import Assignment, Attempt
from streaming.release.naming import BATCH_MESSAGES
from streaming.release.task.deliveries import delivery_rows
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.send_plan import Plan
from streaming.release.task.planning.sending_order import by_time
from tests.support.fuzzing.examples import examples
from tests.support.naive import release_planner as naive
from tests.support.service.plans import sends_of
from tests.support.tracker.messages import messages, release_rows
from tracker.in_flight import IN_ORDER, PLACE, SENDING, SUBSCRIPTION_MASK
from tracker.messages import MESSAGES, in_order
from tracker.packing import pack

TOPICS = [f"persistent://public/default/{name}" for name in ("one", "two")]
HANDED_OUT = MESSAGES.append(pa.field(SUBSCRIPTION_MASK, pa.int64()))
LATER_COLUMNS = ["was_due", "schedule_key", "attempt", "shaped_from", "occurrence", "occurrence_at", "schema_version"]
KEYS = st.sampled_from([None, None, "", "k", "customer-17", "x" * 300, "ключ", "a\u0000b", "\U0001f600"])

ROW = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(TOPICS),
        "partition": st.sampled_from([-1, 0, 5]),
        "ledger_id": st.sampled_from([1, 2, 1 << 52, (1 << 62) + 5]),
        "entry_id": st.integers(0, 50),
        "batch_index": st.integers(-1, 3),
        "batch_size": st.just(1),
        "deliver_at": st.integers(990, 1_030),
        "publish_time": st.just(5),
        "event_time": st.just(0),
        "producer_name": st.just("p"),
        "key": KEYS,
        "ordering_key": st.sampled_from([None, None, "k", "o"]),
        "ordering_key_bytes": st.sampled_from([None, None, b"\xff"]),
        "properties": st.lists(st.tuples(st.sampled_from(["a", "ä" * 9]), st.sampled_from(["b", "", None])), max_size=2)
        | st.just(None),
        "payload": st.sampled_from([None, 0, 100, 40_000, 99_000, 100_000]),  # its bytes
        "reason": st.sampled_from([None, None, None, "bad"]),
        "schema_version": st.sampled_from([None, None, b"", bytes(7) + b"\1", bytes(7) + b"\2"]),
        "sequence": st.sampled_from([None, 3, 7 << 30]),
        "was_due": st.sampled_from([None, None, 500, 503, 700]),
        "attempt": st.sampled_from([None, None, None, 1, 2, 9]),
        "shaped_from": st.sampled_from([None, None, 900]),
        "occurrence": st.sampled_from([None, None, 1, 4]),
        "occurrence_at": st.sampled_from([None, 800, 2_000]),
        SUBSCRIPTION_MASK: st.integers(0, 15),
    }
)
RATE = st.tuples(st.sampled_from([5.0, 0.5]), st.integers(1, 4), st.booleans()).map(list)
ROUTE = st.lists(st.sampled_from("abcd"), unique=True, max_size=4)
DESTINATION = st.sampled_from(["out", "elsewhere", "lost"]).map(lambda name: f"persistent://public/default/{name}")
SUBSCRIPTIONS = ROUTE.flatmap(lambda names: st.tuples(*(st.tuples(st.just(name), DESTINATION) for name in names)))
SENDING_OF = st.fixed_dictionaries(
    {"routes": st.fixed_dictionaries(dict.fromkeys(TOPICS, SUBSCRIPTIONS))},
    optional={
        "lanes": st.just(2),
        "lane_set": st.integers(0, 3),
        "batch_millis": st.sampled_from([1, 5, 1_000]),
        "partitions": st.dictionaries(DESTINATION, st.sampled_from([0, 1, 3, UNKNOWN])),
        "attempts": st.just({TOPICS[0]: {"a": 1}}),
        "shaped": st.fixed_dictionaries(
            {"now": st.just(1_005)},
            optional={"rates": st.dictionaries(st.sampled_from(TOPICS), st.dictionaries(st.sampled_from("012"), RATE))},
        ),
    },
)
ASSIGNMENT = st.tuples(
    st.integers(0, 2),  # the shard
    st.integers(1, 3),  # the tick
    st.integers(0, 3),  # the kind
    st.lists(ROW, max_size=25),
    st.sampled_from(["", "", "places", "old", "bytes"]),
)
TARGET = st.tuples(st.sampled_from(TOPICS), st.sampled_from(["a", "b", "c", "a dlq", ""]))
ATTEMPT = st.fixed_dictionaries(
    {},
    optional={
        "skipped": st.frozensets(TARGET, max_size=3),
        "only": st.frozensets(TARGET, min_size=3),
        "put_off": st.dictionaries(
            st.tuples(st.integers(1, 3), st.integers(0, 3)),
            st.dictionaries(st.tuples(st.sampled_from(TOPICS), st.integers(0, 5)), st.sampled_from([0, 3, 1_000])),
        ),
    },
)

Made = tuple[int, int, int, list[dict[str, Any]], str]


def assignment_of(made: Made, sending: dict[str, Any]) -> Assignment:
    """A release: of all its columns, of some as an earlier version packed it, or with text that is not UTF-8."""
    shard, tick, kind, of_rows, how = made
    of_rows = [row | {"payload": None if row["payload"] is None else b"x" * row["payload"]} for row in of_rows]
    if kind & IN_ORDER:
        of_rows = [row | {"key": row["key"] or "k", "reason": None} for row in of_rows]
    rows = pa.Table.from_pylist(of_rows, schema=HANDED_OUT)
    if kind & IN_ORDER:
        rows = in_order(rows)
    if how == "places":
        rows = rows.append_column(PLACE, pa.array(np.arange(rows.num_rows) * 3 + 5))
    elif how == "old":
        rows = rows.drop_columns(LATER_COLUMNS)
    elif how == "bytes" and rows.num_rows:
        wrong = b"\xff" + b"k" * (rows.num_rows - 1)
        offsets = np.arange(rows.num_rows + 1, dtype=np.int32)
        keys = pa.StringArray.from_buffers(rows.num_rows, pa.py_buffer(offsets), pa.py_buffer(wrong))
        rows = rows.set_column(rows.schema.get_field_index("key"), "key", keys)
    return Assignment("app", shard, tick, kind, pack(rows.replace_schema_metadata({SENDING: json.dumps(sending)})))


def partitions_now(topic: str) -> int | PulsarError:
    return PulsarError("gone") if "lost" in topic else 2


def told(send: Any) -> tuple[Any, ...]:
    """What is planned of a message."""
    return (
        *(send.row, send.due, send.sequence_id, send.topic, send.producer, send.subscription, send.is_batched),
        *(send.at, send.was_at, send.first_id, send.is_last, send.is_large, send.is_dead, send.n_places, send.key),
    )


def assert_same(
    settings: Settings, attempt: Attempt, assignments: Sequence[Assignment], now: Callable[[str], Any] = partitions_now
) -> list[Plan]:
    """Both planners plan, order and report the same; returns the plans."""
    expected = [naive.plan_release(settings, one, attempt, now) for one in assignments]
    plans = [plan_release(settings, one, attempt, now) for one in assignments]
    for plan, other in zip(plans, expected, strict=True):
        assert [told(one)[:-1] for one in sends_of(plan)] == [told(one)[:-1] for one in other.sends]
        assert [told(one)[:6] for one in plan.dropped] == [told(one)[:6] for one in other.dropped]
        assert (plan.skipped, plan.has_held, plan.limits) == (other.skipped, other.has_held, other.limits)
        assert (plan.failed, plan.unsendable) == (other.failed, other.unsendable)
        assert {name: list(plan.columns[name]) for name in plan.columns} == other.columns
    pending, in_order_of_time = by_time(plans), naive.by_time(expected)
    numbers, others = {id(plan): i for i, plan in enumerate(plans)}, {id(plan): i for i, plan in enumerate(expected)}
    assert [(told(send), numbers[id(plan)]) for send, plan in pending] == [
        (told(send), others[id(plan)]) for send, plan in in_order_of_time
    ]
    sent_at = list(range(len(pending)))
    some = np.arange(0, len(pending), 2)
    rows = delivery_rows(pending, some, sent_at)
    wanted = naive.delivery_rows([in_order_of_time[i] for i in some.tolist()], [sent_at[i] for i in some.tolist()])
    rows.validate(full=True)
    assert rows.schema == wanted.schema
    assert rows.equals(wanted)
    return plans


@pytest.mark.slow
@effort(max_examples=examples(300), deadline=None)
@given(SENDING_OF, SENDING_OF, st.lists(ASSIGNMENT, min_size=1, max_size=4), ATTEMPT, st.integers(0, 5))
def test_it_plans_what_the_naive_planner_does(
    sending: dict[str, Any], later: dict[str, Any], made: list[Made], attempt_has: dict[str, Any], n_done: int
) -> None:
    """Also where the settings have changed since, and where something has arrived or is left out."""
    routes = [
        {"source": topic, "subscriptions": [{"name": name, "destination": to} for name, to in of_topic]}
        for topic, of_topic in later["routes"].items()
        if of_topic
    ]
    settings = Settings(routes=routes)  # type: ignore[arg-type]
    # Of one tick and kind each shard has one release.
    assignments = [assignment_of(one, sending) for one in {one[:3]: one for one in made}.values()]
    plans = assert_same(settings, Attempt(**attempt_has), assignments)
    lines = [(plan.tick, *line.key) for plan in plans for line in plan.lines]
    assert_same(settings, Attempt(done=frozenset(lines[:n_done]), **attempt_has), assignments)


@pytest.mark.parametrize("n", [BATCH_MESSAGES - 1, BATCH_MESSAGES, BATCH_MESSAGES + 1, 3 * BATCH_MESSAGES + 7])
@pytest.mark.parametrize("payload", [b"", b"x" * 100, b"x" * 30_000], ids=len)
def test_it_cuts_many_messages_of_one_time_into_the_same_batches(n: int, payload: bytes) -> None:
    rows = messages([(1, i, 1_000 + i // 2_000) for i in range(n)], payload=payload, topic=TOPICS[0])
    to = {name: f"persistent://public/default/{name}" for name in "ab"}
    sending = json.dumps({"batch_millis": 5, "routes": {TOPICS[0]: list(to.items())}})
    subscriptions = [{"name": name, "destination": topic} for name, topic in to.items()]
    settings = Settings(routes=[{"source": TOPICS[0], "subscriptions": subscriptions}])  # type: ignore[arg-type]
    body = pack(release_rows(rows, [1 + i % 3 for i in range(n)], sending))
    [plan] = assert_same(settings, Attempt(), [Assignment("app", 0, 7, 1, body)])
    most = min(BATCH_MESSAGES, 100_000 // (len(payload) + 256), 2 * n // 3)
    assert abs(int(plan.sends.n_places.max()) - most) <= 1
