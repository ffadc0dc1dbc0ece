"""Reading the control topic: what makes a message no command, a command invalid, and what it is for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tracker.commands.decode as decoding
from conf.partitions import without_partition
from tests.support.tracker.messages import messages
from tracker.buckets.index_bits import MAX_ENTRY_ID
from tracker.commands.decode import Decoded, Limits, decode, resolve_topic
from tracker.commands.kinds import ANSWER, CANCEL, REPEAT, RETRY, SKIP
from tracker.commands.match import command_positions
from tracker.due_time import MAX_TIME_MILLIS
from tracker.messages import FIRST_IMPORTED_LEDGER, concat
from tracker.schemas import (
    COMMAND_ROWS,
    MAX_BATCH_INDEX,
    MAX_MESSAGES,
    MAX_NAME_BYTES,
    MAX_NAMES,
    MAX_REQUEST_ID_BYTES,
    SubscriptionRule,
)
from tracker.wire.delaylake_pb2 import (
    CancelDelayedMessage,
    CancelDelayedMessages,
    ControlCommand,
    PauseSubscriptions,
    RescheduleMessages,
    Result,
    RetryMessage,
    SkipEntry,
    SkipMessages,
)

ORDERS = "persistent://public/default/orders"
ROUTES = {ORDERS: [SubscriptionRule("shared", False), SubscriptionRule("exclusive", True)]}


def read(*commands: ControlCommand | bytes) -> Decoded:
    payloads = [c if isinstance(c, bytes) else c.SerializeToString() for c in commands]
    return decode(concat([messages([(1, i, 0)], payload=p) for i, p in enumerate(payloads)]), ROUTES)


def cancel(ledger: int = 1, entry: int = 2, deliver_at: int = 3, **fields: object) -> ControlCommand:
    values: dict[str, Any] = {"request_id": "r", "topic": ORDERS, "issued_by": "me", "issued_at": 9, **fields}
    return ControlCommand(
        cancel=CancelDelayedMessage(ledger_id=ledger, entry_id=entry, deliver_at=deliver_at), **values
    )


def skip(*entries: SkipEntry, **fields: object) -> ControlCommand:
    values: dict[str, Any] = {"request_id": "r", "topic": ORDERS, **fields}
    return ControlCommand(skip=SkipMessages(entries=entries), **values)


@pytest.mark.parametrize("names", [["*"], ["*", "shared"], ["shared", "*", "nobody"]])
def test_a_star_names_all_subscriptions_and_later_ones(names: list[str]) -> None:
    decoded = read(cancel(subscriptions=names))
    rows = decoded.commands.to_pylist()
    [row] = [row for row in rows if row["kind"] == CANCEL]
    assert (row["subscriptions"], row["also_later"]) == (0b11, True)
    assert [r["subscription"] for r in rows if r["kind"] == ANSWER] == [n for n in names if n == "nobody"]
    [none_named] = read(cancel()).commands.to_pylist()
    assert (none_named["subscriptions"], none_named["also_later"]) == (0b11, None)
    assert decoded.request_ids != read(cancel()).request_ids, "it is another command"

    paused = read(ControlCommand(request_id="p", topic=ORDERS, subscriptions=["*"], pause=PauseSubscriptions()))
    assert [row["subscription"] for row in paused.commands.to_pylist()] == ["shared", "exclusive", "*"]
    assert [(change.subscriptions, change.is_paused) for change in paused.pause_changes] == [(0b11, True)]


def test_a_cancel_is_a_row_for_all_subscriptions() -> None:
    decoded = read(cancel())
    row = decoded.commands.to_pylist()[0]
    assert (row["kind"], row["topic"], row["partition"], row["subscriptions"]) == (CANCEL, ORDERS, -1, 0b11)
    assert (row["ledger_id"], row["entry_id"], row["batch_index"], row["deliver_at"]) == (1, 2, -1, 3)
    assert (row["request_id"], row["issued_by"], row["issued_at"]) == ("r", "me", 9)
    assert list(decoded.request_ids) == ["r"]
    assert decoded.rejects.num_rows == 0


def test_a_skip_is_a_row_for_each_message_and_each_whole_entry() -> None:
    decoded = read(
        skip(
            SkipEntry(ledger_id=1, entry_id=2, batch_indexes=[0, 4, 4, MAX_BATCH_INDEX]),
            SkipEntry(ledger_id=1, entry_id=MAX_ENTRY_ID),
            subscriptions=["shared"],
        )
    )
    rows = decoded.commands.to_pylist()
    assert [(r["entry_id"], r["batch_index"]) for r in rows] == [
        (2, 0),
        (2, 4),
        (2, MAX_BATCH_INDEX),
        (MAX_ENTRY_ID, -1),
    ]
    assert {(r["kind"], r["subscriptions"], r["deliver_at"]) for r in rows} == {(SKIP, 0b01, 0)}
    assert sorted(command_positions(decoded.commands).to_pylist(), key=str) == [
        {"ledger_id": 1, "entry_id": 2},
        {"ledger_id": 1, "entry_id": MAX_ENTRY_ID},
    ]


def retry(*subscriptions: str, **fields: Any) -> ControlCommand:
    entry = SkipEntry(ledger_id=1, entry_id=2, batch_indexes=[3])
    message = RetryMessage(**({"entry": entry} | fields))
    return ControlCommand(request_id="r", topic=ORDERS, subscriptions=subscriptions, retry=message)


def test_a_retry_is_a_row_for_its_subscription() -> None:
    decoded = read(retry("exclusive", reason="x" * 2_000, after_millis=5))
    [row] = decoded.commands.to_pylist()
    assert (row["kind"], row["operation"], row["subscriptions"]) == (RETRY, "RETRY", 0b10)
    assert (row["ledger_id"], row["entry_id"], row["batch_index"], row["deliver_at"]) == (1, 2, 3, 0)
    assert (row["reason"], row["after_millis"], row["attempt"]) == ("x" * 1_000, 5, None)
    bodies = {
        next(iter(read(one).request_ids.values()))
        for one in (retry("shared"), retry("exclusive"), retry("shared", reason="no"), retry("shared", after_millis=1))
    }
    assert len(bodies) == 4, "they are different commands"
    [nobody] = read(retry("nobody", reason="why")).commands.to_pylist()
    assert (nobody["kind"], nobody["result"], nobody["reason"]) == (
        ANSWER,
        Result.NOT_FOUND,
        "the topic has no such subscription",
    )


@pytest.mark.parametrize("payload", [b"\xff\xff\xff", b"\x0a\x05ab", b"hello, world"])
def test_bytes_that_are_no_command_are_rejected_and_not_answered(payload: bytes) -> None:
    decoded = read(payload)
    assert decoded.commands.num_rows == 0
    assert list(decoded.request_ids) == []
    assert decoded.rejects["reason"].to_pylist() == ["the bytes are no command"]
    assert decoded.rejects["payload"].to_pylist() == [payload]


@pytest.mark.parametrize("own", ["superseded", "retryOf", "redrive-7", "rebuild-7", "not-delivered-7"])
def test_the_ids_of_the_jobs_own_outcomes_are_no_request_ids(own: str) -> None:
    decoded = read(cancel(request_id=own).SerializeToString())
    assert decoded.commands.num_rows == 0
    assert list(decoded.request_ids) == []
    assert decoded.rejects["reason"].to_pylist() == [f"the request id {own!r} is reserved for what the job does itself"]
    assert list(read(cancel(request_id=f"my-{own}").SerializeToString()).request_ids) == [f"my-{own}"]


@pytest.mark.parametrize("payload", [b"", cancel(request_id="").SerializeToString()])
def test_without_a_request_id_there_is_nothing_to_answer(payload: bytes) -> None:
    decoded = read(payload)
    assert decoded.commands.num_rows == 0
    assert list(decoded.request_ids) == []
    assert decoded.rejects["reason"].to_pylist() == ["no command with a request id"]


BY_BOTH = "a message is named by its id or by its schedule_key, not by both"

# An operation that a later version may know: field 12, an empty message.
LATER = ControlCommand(request_id="r", topic=ORDERS).SerializeToString() + b"\xc2\x0c\x00"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (LATER, "no operation, or one that is not known here"),
        (ControlCommand(request_id="r", topic=ORDERS), "no operation, or one that is not known here"),
        (cancel(ledger=-1), "no such position can be: -1:2"),
        (retry(), "a retry names one subscription: the one whose consumer failed"),
        (retry("shared", "exclusive"), "a retry names one subscription: the one whose consumer failed"),
        (retry("*"), "a retry names one subscription: the one whose consumer failed"),
        (retry("shared", after_millis=-1), "after_millis must be from 0 to 31,622,400,000: -1"),
        (retry("shared", entry=SkipEntry(ledger_id=-1)), "no such position can be: -1:0"),
        (
            retry("shared", entry=SkipEntry(schedule_key="k")),
            "a retry names its message by its id: a schedule key is that of one that waits",
        ),
        (skip(SkipEntry(schedule_key="k", batch_indexes=[0])), BY_BOTH),
        (skip(SkipEntry(schedule_key="k", partition=0)), BY_BOTH),
        (skip(SkipEntry(schedule_key="k", entry_id=1)), BY_BOTH),
        (cancel(entry=-1), "no such position can be: 1:-1"),
        (cancel(entry=MAX_ENTRY_ID + 1), f"no such position can be: 1:{MAX_ENTRY_ID + 1}"),
        (cancel(deliver_at=0), "deliver_at must be positive: 0"),
        (cancel(deliver_at=-5), "deliver_at must be positive: -5"),
        (cancel(deliver_at=2**63 - 1), f"deliver_at is beyond the year 9999: {2**63 - 1}"),
        (skip(), "a skip of no entries"),
        (skip(SkipEntry(ledger_id=1, entry_id=1), SkipEntry(ledger_id=-7)), "no such position can be: -7:0"),
        (ControlCommand(request_id="r", cancels=CancelDelayedMessages()), "a cancel of no entries"),
        (skip(SkipEntry(ledger_id=1, entry_id=1, batch_indexes=[-1])), "batch index -1 is out of range"),
        (
            skip(SkipEntry(ledger_id=1, entry_id=1, batch_indexes=[MAX_BATCH_INDEX + 1])),
            f"batch index {MAX_BATCH_INDEX + 1} is out of range",
        ),
        (
            skip(SkipEntry(ledger_id=1, entry_id=1, batch_indexes=range(MAX_MESSAGES)), SkipEntry()),
            f"a skip of more than {MAX_MESSAGES:,} messages",
        ),
        (cancel(subscriptions=["s"] * (MAX_NAMES + 1)), f"more than {MAX_NAMES:,} subscriptions"),
        (cancel(subscriptions=["s" * (MAX_NAME_BYTES + 1)]), f"a name has more than {MAX_NAME_BYTES:,} bytes"),
        (cancel(issued_by="\u00e9" * MAX_NAME_BYTES), f"a name has more than {MAX_NAME_BYTES:,} bytes"),
    ],
)
def test_a_command_that_can_not_be_applied_is_rejected_and_answered(
    command: ControlCommand | bytes, reason: str
) -> None:
    decoded = read(command)
    assert decoded.rejects["reason"].to_pylist() == [reason]
    assert [(r["kind"], r["result"], r["reason"], r["subscription"]) for r in decoded.commands.to_pylist()] == [
        (ANSWER, Result.INVALID, reason, None)
    ]
    assert list(decoded.request_ids) == []


def test_what_is_too_long_to_be_answered_is_not() -> None:
    """An answer that the broker does not take would stop the job."""
    assert list(read(cancel(request_id="r" * MAX_REQUEST_ID_BYTES)).request_ids) == ["r" * MAX_REQUEST_ID_BYTES]
    decoded = read(cancel(request_id="r" * (MAX_REQUEST_ID_BYTES + 1)))
    assert decoded.commands.num_rows == 0
    assert decoded.rejects["reason"].to_pylist() == [f"the request id has more than {MAX_REQUEST_ID_BYTES} bytes"]
    row = read(cancel(topic="t" * 5_000_000, issued_by="i" * 5_000_000)).commands.to_pylist()[0]
    assert (row["topic"], row["issued_by"], row["result"]) == ("", "", Result.INVALID)


def test_a_latest_time_can_be_cancelled() -> None:
    assert read(cancel(deliver_at=MAX_TIME_MILLIS)).commands["kind"].to_pylist() == [CANCEL]


def test_an_unknown_topic_is_not_found() -> None:
    partitions = ("", "x", "-1", "\u00b2", "\u0663", "9999999999")
    for topic in ("nowhere", "", "persistent://a/b/orders", *(f"{ORDERS}-partition-{p}" for p in partitions)):
        decoded = read(cancel(topic=topic))
        row = decoded.commands.to_pylist()[0]
        assert (row["kind"], row["result"], row["topic"]) == (ANSWER, Result.NOT_FOUND, topic)
        assert decoded.rejects.num_rows == 0
        assert list(decoded.request_ids) == []


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        ("orders", -1),
        ("public/default/orders", -1),
        (ORDERS, -1),
        ("orders-partition-3", 3),
        (ORDERS + "-partition-11", 11),
    ],
)
def test_a_topic_may_be_named_in_short_and_by_partition(name: str, partition: int) -> None:
    row = read(cancel(topic=name)).commands.to_pylist()[0]
    assert (row["kind"], row["topic"], row["partition"]) == (CANCEL, ORDERS, partition)
    assert resolve_topic(name, ROUTES) == (ORDERS, partition)


@pytest.mark.parametrize("number", ["05", "00", "-1", "+5", "", "x", "2147483648", "1.0", "5-partition-x"])
def test_only_a_number_as_pulsar_writes_it_is_a_partition(number: str) -> None:
    """As TopicName.getPartitionIndex has it: `orders-partition-05` is a topic of its own."""
    name = f"{ORDERS}-partition-{number}"
    assert resolve_topic(name, ROUTES) == (None, -1)
    assert without_partition(name) == name
    [row] = read(cancel(topic=name)).commands.to_pylist()
    assert (row["kind"], row["result"], row["topic"]) == (ANSWER, Result.NOT_FOUND, name)


@pytest.mark.parametrize("number", [0, 5, 10, 2**31 - 1])
def test_a_partition_has_a_number_of_31_bits(number: int) -> None:
    assert resolve_topic(f"{ORDERS}-partition-{number}", ROUTES) == (ORDERS, number)
    assert without_partition(f"{ORDERS}-partition-{number}") == ORDERS


def test_an_unknown_subscription_is_not_found_and_the_others_are_served() -> None:
    decoded = read(cancel(subscriptions=["shared", "nobody"]))
    rows = {r["kind"]: r for r in decoded.commands.to_pylist()}
    assert (rows[ANSWER]["subscription"], rows[ANSWER]["result"]) == ("nobody", Result.NOT_FOUND)
    assert rows[CANCEL]["subscriptions"] == 0b01
    alone = read(cancel(subscriptions=["nobody"])).commands
    assert alone["kind"].to_pylist() == [ANSWER]


def test_a_cumulative_subscription_refuses_a_skip_but_no_cancel() -> None:
    decoded = read(skip(SkipEntry(ledger_id=1, entry_id=2)))
    rows = {r["kind"]: r for r in decoded.commands.to_pylist()}
    assert (rows[ANSWER]["subscription"], rows[ANSWER]["result"]) == ("exclusive", Result.NOT_ALLOWED)
    assert rows[SKIP]["subscriptions"] == 0b01
    only = read(skip(SkipEntry(ledger_id=1, entry_id=2), subscriptions=["exclusive"], topic="orders"))
    assert only.commands["result"].to_pylist() == [Result.NOT_ALLOWED]
    assert only.commands["topic"].to_pylist() == [ORDERS]
    assert list(only.request_ids) == []
    assert read(cancel(subscriptions=["exclusive"])).commands["subscriptions"].to_pylist() == [0b10]


def test_one_command_may_cancel_many_entries() -> None:
    named = [CancelDelayedMessage(ledger_id=1, entry_id=i, deliver_at=10 + i) for i in range(3)]
    cancels = CancelDelayedMessages(messages=named)
    decoded = read(ControlCommand(request_id="r", topic=ORDERS, cancels=cancels))
    rows = decoded.commands.to_pylist()
    assert [(r["kind"], r["operation"], r["entry_id"], r["batch_index"], r["deliver_at"]) for r in rows] == [
        (CANCEL, "CANCEL", i, -1, 10 + i) for i in range(3)
    ]
    assert list(decoded.request_ids) == ["r"]


def test_an_entry_of_another_partition_than_the_topic_is_invalid() -> None:
    entries = [SkipEntry(ledger_id=1, entry_id=i, partition=p) for i, p in enumerate((3, 4, -1))]
    decoded = read(skip(*entries, topic="orders-partition-3", subscriptions=["shared"]))
    rows = decoded.commands.to_pylist()
    assert [(r["kind"], r["entry_id"], r["partition"], r["result"]) for r in rows] == [
        (ANSWER, 1, -1, Result.INVALID),
        (SKIP, 0, 3, None),
        (SKIP, 2, 3, None),
    ]


def test_the_partition_of_an_entry_serves_where_the_topic_names_none() -> None:
    entries = [SkipEntry(ledger_id=1, entry_id=0, partition=4), SkipEntry(ledger_id=1, entry_id=1)]
    assert read(skip(*entries, subscriptions=["shared"])).commands["partition"].to_pylist() == [4, -1]


def test_a_request_id_that_comes_twice_counts_once() -> None:
    twice = skip(SkipEntry(ledger_id=1, entry_id=2))
    decoded = read(cancel(entry=1), twice, cancel(entry=3, request_id="s"))
    rows = decoded.commands.to_pylist()
    assert [(r["request_id"], r["kind"], r["entry_id"], r["result"], r["subscriptions"]) for r in rows] == [
        ("r", CANCEL, 1, None, 0b11),
        ("r", REPEAT, -1, Result.NOT_ALLOWED, 0),
        ("r", REPEAT, 2, None, 0b01),
        ("s", CANCEL, 3, None, 0b11),
    ]
    assert list(decoded.request_ids) == ["r", "s"]
    assert decoded.request_ids["r"] == rows[0]["body"] != rows[1]["body"] == rows[2]["body"]


def test_a_body_is_what_a_command_says() -> None:
    entries = [SkipEntry(ledger_id=1, entry_id=2), SkipEntry(ledger_id=1, entry_id=3, batch_indexes=[0, 1])]

    def body(command: ControlCommand) -> int:
        return int(read(command).commands["body"][0].as_py())

    one = body(skip(*entries, subscriptions=["shared", "exclusive"]))
    hinted = [SkipEntry(ledger_id=1, entry_id=3, batch_indexes=[1, 0]), entries[0]]
    hinted[1].deliver_at = 99
    # By whom, when, in which order, and where to look is not what it says.
    asked = {"issued_by": "you", "issued_at": 7, "sum_up": True, "request_id": "s", "topic": "orders"}
    assert body(skip(*hinted, subscriptions=["exclusive", "shared", "shared"], **asked)) == one
    others = [
        skip(*entries),
        skip(*entries, subscriptions=["shared"]),
        skip(entries[0], subscriptions=["shared", "exclusive"]),
        skip(*entries, subscriptions=["shared", "exclusive"], topic="orders-partition-1"),
        cancel(subscriptions=["shared", "exclusive"]),
        cancel(subscriptions=["shared", "exclusive"], deliver_at=99),
        cancel(),
    ]
    assert len({one, *map(body, others)}) == len(others) + 1


def test_a_command_with_nothing_to_apply_may_come_again_corrected() -> None:
    decoded = read(cancel(deliver_at=0), cancel(topic="nowhere"), cancel(subscriptions=["nobody"]), cancel())
    assert decoded.commands["result"].to_pylist() == [Result.INVALID, Result.NOT_FOUND, Result.NOT_FOUND, None]
    assert list(decoded.request_ids) == ["r"]


def test_nothing_that_comes_stops_what_comes_after_it() -> None:
    decoded = read(b"\xff", cancel(deliver_at=0, request_id="bad"), LATER, b"", cancel(request_id="good"))
    assert decoded.commands["request_id"].to_pylist()[-1] == "good"
    assert decoded.commands["kind"].to_pylist()[-1] == CANCEL
    assert decoded.rejects.num_rows == 4


INT64 = st.one_of(st.integers(-3, 5), st.integers(-(2**63), 2**63 - 1))
INT32 = st.one_of(st.integers(-3, 5), st.integers(-(2**31), 2**31 - 1))
NAMES = st.one_of(
    st.sampled_from(["orders", ORDERS, "shared", "exclusive"]),
    st.text(max_size=6).map(lambda text: f"{ORDERS}-partition-{text}"),
    st.text(max_size=20),
)
ENTRIES = st.builds(
    SkipEntry,
    ledger_id=INT64,
    entry_id=INT64,
    batch_indexes=st.lists(INT32, max_size=3),
    partition=st.one_of(st.none(), INT32),
)
FIELDS = {
    "request_id": st.text(max_size=3),
    "topic": NAMES,
    "subscriptions": st.lists(NAMES, max_size=3),
    "issued_at": INT64,
    "issued_by": NAMES,
}
ANY_COMMAND = st.one_of(
    st.builds(
        ControlCommand,
        cancel=st.builds(CancelDelayedMessage, ledger_id=INT64, entry_id=INT64, deliver_at=INT64),
        **FIELDS,
    ),
    st.builds(ControlCommand, skip=st.builds(SkipMessages, entries=st.lists(ENTRIES, max_size=3)), **FIELDS),
    st.builds(
        ControlCommand,
        retry=st.builds(RetryMessage, entry=ENTRIES, reason=st.text(max_size=3), after_millis=INT64),
        **FIELDS,
    ),
    st.builds(ControlCommand, **FIELDS),
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=40), ANY_COMMAND.map(ControlCommand.SerializeToString)), max_size=6))
@example([b"\x0a\x01r\x12\xff\xff\xff\xff\x0f"])
def test_whatever_comes_is_a_command_or_rejected(payloads: list[bytes]) -> None:
    """One message that can't be taken must not stop the job."""
    decoded = read(*payloads) if payloads else decode(messages([]), ROUTES)
    assert decoded.commands.schema == COMMAND_ROWS
    applied = [row for row in decoded.commands.to_pylist() if row["kind"] not in (ANSWER, REPEAT)]
    assert set(decoded.request_ids) == {row["request_id"] for row in applied}
    for row in applied:
        assert row["topic"] == ORDERS
        assert row["subscriptions"] in ((1, 2, 3) if row["kind"] == CANCEL else (1,))
        assert row["ledger_id"] >= 0
        assert 0 <= row["entry_id"] <= MAX_ENTRY_ID
        assert -1 <= row["batch_index"] <= MAX_BATCH_INDEX
        assert row["partition"] >= -1
    # Each message is rejected, or answered, or applied.
    answered = {row["request_id"] for row in decoded.commands.to_pylist()}
    for payload in payloads:
        if payload not in decoded.rejects["payload"].to_pylist():
            assert ControlCommand.FromString(payload).request_id in answered


def test_no_messages_are_no_commands() -> None:
    decoded = decode(messages([]), ROUTES)
    assert (decoded.commands.num_rows, decoded.request_ids, decoded.rejects.num_rows) == (0, {}, 0)


def test_a_ledger_far_beyond_the_newest_is_not_found_for_itself_alone() -> None:
    newest = Limits(newest_ledgers={ORDERS: 5_000})
    entries = [
        SkipEntry(ledger_id=ledger, entry_id=1) for ledger in (7, 1_005_000, 1_005_001, FIRST_IMPORTED_LEDGER + 1)
    ]
    payload = skip(*entries, subscriptions=["shared"]).SerializeToString()
    rows = decode(messages([(1, 0, 0)], payload=payload), ROUTES, newest).commands.to_pylist()
    named = [row["ledger_id"] for row in rows if row["kind"] == SKIP]
    assert named == [7, 1_005_000, FIRST_IMPORTED_LEDGER + 1]
    [refused] = [row for row in rows if row["kind"] == ANSWER]
    assert (refused["ledger_id"], refused["subscription"]) == (1_005_001, "shared")
    assert refused["result"] == Result.NOT_FOUND
    assert refused["reason"] == "the topic has no such message"
    # What is not known of a topic is no limit.
    assert decode(messages([(1, 0, 0)], payload=payload), ROUTES).commands.num_rows == 4


@pytest.mark.parametrize("kind", ["cancel", "reschedule", "reschedule by key"])
def test_a_time_is_within_what_a_message_may_have(kind: str) -> None:
    hour = 3_600_000

    def refused(time: int, max_delay: int) -> list[str]:
        entry = SkipEntry(schedule_key="k") if kind.endswith("key") else SkipEntry(ledger_id=1, entry_id=2)
        move = RescheduleMessages(entries=[entry], deliver_at=time)
        asked = cancel(deliver_at=time) if kind == "cancel" else cancel(reschedule=move)
        table = messages([(1, 0, 0)], payload=asked.SerializeToString(), publish_time=1_000)
        rows = decode(table, ROUTES, Limits(max_delay)).commands.to_pylist()
        return [row["reason"] for row in rows if row["result"] == Result.INVALID]

    assert refused(1_000 + hour, hour) == []
    assert refused(1_000 + 2 * hour, hour) == [
        f"deliver_at is beyond the longest delay of a message, {hour} ms: {1_000 + 2 * hour}"
    ]
    assert refused(MAX_TIME_MILLIS - 1, 0) == []


def test_a_command_that_its_batch_has_no_room_for_is_invalid_and_the_others_are_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoding, "MAX_ANSWERS", 10)

    def of_messages(request_id: str, n: int, subscriptions: tuple[str, ...] = ("shared",)) -> ControlCommand:
        entry = SkipEntry(ledger_id=1, entry_id=2, batch_indexes=range(n))
        return skip(entry, request_id=request_id, subscriptions=subscriptions)

    decoded = read(
        of_messages("first", 6),
        of_messages("too many", 6),
        of_messages("fits", 4),
        of_messages("never", 11),
        *(of_messages(f"for each {n}", 1) for n in range(2)),
    )
    rows = decoded.commands.to_pylist()
    assert [r["request_id"] for r in rows if r["kind"] == SKIP] == ["first"] * 6 + ["fits"] * 4
    refused = {r["request_id"]: (r["result"], r["reason"]) for r in rows if r["kind"] == ANSWER}
    assert set(refused) == {"too many", "never", "for each 0", "for each 1"}
    assert all(result == Result.INVALID for result, _ in refused.values())
    assert "more than 10 messages together" in refused["too many"][1]
    assert "it names 11 messages" in refused["never"][1]
    assert decoded.rejects.num_rows == 4, "they are kept"
    assert set(decoded.request_ids) == {"first", "fits"}, "the others may come again"


def test_each_subscription_of_a_command_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_ANSWERS", 2)
    [row] = read(cancel(subscriptions=["*"])).commands.to_pylist()
    assert (row["kind"], row["result"]) == (ANSWER, Result.INVALID), "two subscriptions, and those that are added later"
    assert [row["kind"] for row in read(cancel()).commands.to_pylist()] == [CANCEL]
