"""What the Python client takes, and what it refuses before anything is sent."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, get_args, get_origin
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest
from delaylake import AsyncClient, Client, MessageId, Outcome, PendingMessage, Redriven, Schedule
from delaylake import scheduled as scheduled_module
from delaylake.commands import cancel, command, full_name, reschedule
from delaylake.methods import Methods
from delaylake.paging import listing
from delaylake.rest import redrive
from delaylake.scheduled import KeyRule, Repeat, scheduled
from delaylake.times import due, millis, moment

from tests.support.clients.awaited_client import awaited
from tracker.properties import MAX_KEY_BYTES, SCHEDULE_KEY, Mode, key_rule, schedule_key
from tracker.recurrence.recurrence import Recurrence, RecurrenceError

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
NOON_MILLIS = 1_896_091_200_000


LAST_MILLIS = 253_402_300_799_999


def test_a_time_has_a_zone_and_is_never_before_the_one_that_was_given() -> None:
    assert millis("at", NOON) == millis("at", NOON.astimezone(timezone(timedelta(hours=9)))) == NOON_MILLIS
    assert millis("at", NOON + timedelta(microseconds=1)) == NOON_MILLIS + 1
    assert moment(NOON_MILLIS) == NOON
    assert millis("at", moment(LAST_MILLIS)) == LAST_MILLIS


@pytest.mark.parametrize(
    ("wrong", "error", "what"),
    [
        (NOON.replace(tzinfo=None), ValueError, "no time zone"),
        (datetime.min.replace(tzinfo=UTC), ValueError, "1970"),
        (datetime.max.replace(tzinfo=UTC), ValueError, "9999"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-9))), ValueError, "9999"),
        (datetime.max.replace(tzinfo=ZoneInfo("America/New_York")), ValueError, "9999"),
        ("2030-01-31T12:00Z", TypeError, "no datetime"),
        (NOON_MILLIS, TypeError, "no datetime"),
    ],
)
def test_what_is_no_time_is_refused_by_the_name_of_its_argument(wrong: Any, error: type[Exception], what: str) -> None:
    for name, call in {
        "at": lambda: scheduled("orders", b"", wrong, None, None, None, None, None),
        "event_time": lambda: scheduled("orders", b"", NOON, None, None, None, None, wrong),
        "repeat_until": lambda: recurring("@every 1d", until=wrong),
        "deliver_at": lambda: cancel("orders", "7:0", None, None, wrong),
        "due_from": lambda: listing("orders", None, None, wrong, None, None, "waiting", None),
        "due_before": lambda: listing("orders", None, None, None, wrong, None, "waiting", None),
        "published_from": lambda: redrive("orders", "a", None, None, None, None, wrong, None, True, 1, None),
        "published_before": lambda: redrive("orders", "a", None, None, None, None, None, wrong, True, 1, None),
    }.items():
        with pytest.raises(error, match=f"^{name} is .*{what}|^{name} has {what}"):
            call()
    with pytest.raises(error, match=f"^at .*{what}"):
        reschedule("orders", "7:0", None, None, wrong, None)


def test_a_message_is_due_at_a_time_or_after_one() -> None:
    before = millis("now", datetime.now(UTC))
    assert 10_000 <= due(None, timedelta(seconds=10)) - before < 60_000
    assert due(NOON, None) == NOON_MILLIS
    wrong: list[tuple[Any, Any, Any]] = [
        (None, None, ValueError),
        (NOON, timedelta(1), ValueError),
        (None, timedelta(-1), ValueError),
        (None, timedelta.max, ValueError),
        (None, timedelta(days=365 * 8_000), ValueError),
        (None, 10, TypeError),
    ]
    for at, after, error in wrong:
        with pytest.raises(error, match=r"^one of at and after|^after is"):
            due(at, after)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("7:0", MessageId(7, 0)),
        ("7:0:3", MessageId(7, 0, -1, 3)),
        ("7:0:2:3", MessageId(7, 0, 2, 3)),
        ("7:0:-1:-1", MessageId(7, 0)),
    ],
)
def test_a_message_id_as_text(text: str, meant: MessageId) -> None:
    assert MessageId.parse(text) == MessageId.parse(str(meant)) == meant
    assert MessageId.parse(text, NOON).deliver_at == NOON
    assert MessageId.of(text, NOON) == meant == MessageId.of(meant, NOON)


@pytest.mark.parametrize("text", ["", "7", "7:", "7:x", "-7:0", "7:0:1:2:3", "\uff17:0", "7:0\n"])
def test_what_is_no_message_id(text: str) -> None:
    with pytest.raises(ValueError, match="no message id"):
        MessageId.parse(text)


def test_topics_may_be_short() -> None:
    assert full_name("orders") == full_name("persistent://public/default/orders")
    assert full_name("shop/web/orders") == "persistent://shop/web/orders"
    for wrong in ("", "a/b", "non-persistent://public/default/orders", "persistent://orders", "a//b"):
        with pytest.raises(ValueError, match="no persistent topic"):
            full_name(wrong)


def test_a_message_of_a_partition_is_looked_for_there() -> None:
    there = "persistent://public/default/orders-partition-2"
    assert command("skip", "orders", "7:0:2:3", None, None).topic == there
    assert command("skip", "orders-partition-2", "7:0:2:3", None, None).topic == there
    assert command("skip", "orders", "7:0:3", None, None).topic == "persistent://public/default/orders"


def test_a_command_has_an_id_of_its_own_unless_one_is_chosen() -> None:
    first, second = (command("skip", "orders", "7:0", "a", None) for _ in range(2))
    assert first.request_id != second.request_id
    assert command("skip", "orders", "7:0", "a", "mine").request_id == "mine"
    with pytest.raises(ValueError, match="request_id"):
        command("skip", "orders", "7:0", "a", "")
    with pytest.raises(ValueError, match=r"at \(an error has it\): after"):
        reschedule("orders", "7:0", None, "mine", None, timedelta(1))


def test_a_cancel_needs_a_time_and_is_of_a_whole_entry() -> None:
    assert cancel("orders", MessageId(7, 0, deliver_at=NOON), None, None, None).deliver_at == NOON_MILLIS
    assert cancel("orders", "7:0", None, None, NOON).deliver_at == NOON_MILLIS
    with pytest.raises(ValueError, match="needs deliver_at"):
        cancel("orders", "7:0", None, None, None)
    with pytest.raises(ValueError, match="skip"):
        cancel("orders", "7:0:3", None, None, NOON)


@pytest.mark.parametrize("payload", [5, [1, 2], None])
def test_a_payload_is_bytes_or_a_text(payload: Any) -> None:
    with pytest.raises(TypeError, match="neither bytes nor a text"):
        scheduled("orders", payload, NOON, None, None, None, None, None)


def test_what_is_scheduled_has_the_property_that_the_service_reads() -> None:
    made = scheduled("orders", "ü", NOON, None, "k", None, {"region": "eu"}, NOON)
    assert (made.payload, made.properties) == ("ü".encode(), {"region": "eu", "deliverAt": str(NOON_MILLIS)})
    assert (made.deliver_at, made.event_time) == (NOON, NOON_MILLIS)
    for name in ("deliverAt", "deliverAfter", "delaylake.source", "repeat", "misfire", "scheduleKey", "debounceMax"):
        with pytest.raises(ValueError, match="own"):
            scheduled("orders", b"", NOON, None, None, None, {name: "1"}, None)


@pytest.mark.parametrize(("wrong", "error"), [(5, TypeError), (b"k", TypeError), ("\ud800", ValueError)])
def test_what_is_no_text_is_refused_by_its_name(wrong: Any, error: type[Exception]) -> None:
    for name, properties, key, ordering_key in (
        ("key ", None, wrong, None),
        ("ordering_key ", None, None, wrong),
        ("the property 'n' ", {"n": wrong}, None, None),
        ("the name of a property ", {wrong: "n"}, None, None),
    ):
        with pytest.raises(error, match=f"^{name}"):
            scheduled("orders", b"", NOON, None, key, ordering_key, properties, None)


@pytest.mark.parametrize("wrong", [5, (7, 0), b"7:0"])
def test_what_is_no_topic_or_message_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^topic "):
        command("skip", wrong, "7:0", None, None)
    with pytest.raises(TypeError, match=r"^message "):
        command("skip", "orders", wrong, None, None)


ONE: dict[str, Any] = {"message": "7:0", "subscription": "a"}
BY_KEY = ("skip", "deliver_now", "skip_next", "pause_schedule", "resume_schedule")
RIGHT: dict[str, dict[str, Any]] = {
    "schedule": {"payload": b"", "at": NOON},
    "cancel": ONE | {"deliver_at": NOON},
    "reschedule": ONE | {"at": NOON},
    "postpone": ONE | {"by": timedelta(minutes=1)},
    **dict.fromkeys((*BY_KEY, "restore", "retry", "end_schedule"), ONE),
    **{name: {"subscription": "a"} for name in ("pause", "resume", "redrive")},
    "pending": {},
    "schedules": {},
    "get": {"message": "7:0"},
}
COMMANDS = tuple(name for name, right in RIGHT.items() if "message" in right and name != "get")
OF_ONE = ("pause", "resume", "redrive")  # for one subscription
KEYED = ("schedule", "cancel", "reschedule", "postpone", *BY_KEY)

HALF = "\ud800"  # of a surrogate pair: no UTF-8
NO_TEXT = ((5, TypeError), (b"a", TypeError), (HALF, ValueError))
NO_NUMBER = tuple((wrong, ValueError) for wrong in ("x", True, 1.5, 0, 2**63))
NO_ID = tuple((wrong, ValueError) for wrong in (f"{2**63}:0", f"7:{2**63}", MessageId(2**63, 0), MessageId(7, -1)))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("way", [{"url": "http://127.0.0.1:1"}, {"broker": "pulsar://127.0.0.1:1"}])
@pytest.mark.parametrize(
    ("name", "methods", "wrong"),
    [
        ("topic", RIGHT, NO_TEXT),
        ("schedule_key", KEYED, (*NO_TEXT, ("", ValueError))),
        ("subscription", (*COMMANDS, *OF_ONE, "pending", "schedules"), NO_TEXT),
        ("request_id", (*COMMANDS, *OF_ONE), NO_TEXT),
        ("message", (*COMMANDS, "get"), (*NO_ID, (5, TypeError))),
        ("repeat", ["schedule"], (*NO_TEXT, (timedelta(1), TypeError))),
        ("time_zone", ["schedule"], NO_TEXT),
        ("repeat_times", ["schedule"], NO_NUMBER),
        ("payload", ["schedule"], [(HALF, ValueError)]),
        ("key", ["schedule", "redrive", "pending"], NO_TEXT),
        ("key", ["pending"], [("k" * 100_000, ValueError)]),
        ("propert", ["schedule", "redrive", "pending"], [(["a"], TypeError), ({"a": 5}, TypeError)]),
        ("reason", ["retry", "redrive"], NO_TEXT),
        ("reason", ["retry"], [(None, TypeError)]),
        ("subscription", OF_ONE, [(None, TypeError)]),
        ("messages", ["redrive"], [("7:0", TypeError), (MessageId(7, 0), TypeError), (5, TypeError)]),
        ("limit", ["redrive", "pending", "schedules"], NO_NUMBER),
        ("state", ["pending"], [(["waiting"], TypeError), ("asleep", ValueError)]),
    ],
)
def test_both_clients_name_the_argument_that_is_wrong(
    kind: type[Any],
    way: dict[str, str],
    name: str,
    methods: Iterable[str],
    wrong: Iterable[tuple[Any, type[Exception]]],
) -> None:
    made = kind(**way, timeout_seconds=0.2)
    with awaited(made) if kind is AsyncClient else made as lake:
        for method, (value, error) in itertools.product(methods, wrong):
            arguments = {"topic": "orders"} | RIGHT[method] | {"properties" if name == "propert" else name: value}
            if name == "schedule_key":
                arguments = {of: right for of, right in arguments.items() if of not in ("message", "deliver_at")}
            if name in ("time_zone", "repeat_times"):
                arguments["repeat"] = "0 9 * * *"
            with pytest.raises(error, match=name):
                getattr(lake, method)(**arguments)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("url", 5, TypeError),
        ("broker", 5, TypeError),
        ("broker", "", ValueError),
        ("broker", "localhost:6650", ValueError),
        ("broker", "http://localhost:8080", ValueError),
        ("broker", "pulsar://", ValueError),
        ("control_topic", 5, TypeError),
        ("timeout_seconds", None, TypeError),
        ("timeout_seconds", "5", TypeError),
    ],
)
def test_what_a_client_is_made_with_is_named_where_it_is_wrong(
    kind: type[Any], name: str, wrong: Any, error: type
) -> None:
    with pytest.raises(error, match=f"^{name} "):
        kind(**{"url": "http://127.0.0.1:1", name: wrong})
    for broker in ("pulsar+ssl://localhost:6651", "pulsar://a:6650,b:6650"):
        kind(broker=broker)


@pytest.mark.parametrize("wrong", ["a b", "a\nb", "ü", "x" * 129, ""])
def test_a_request_id_that_the_api_does_not_take_is_refused_before_anything_is_sent(wrong: str) -> None:
    with Client("http://127.0.0.1:1") as lake:
        for call in (
            lambda: lake.skip("orders", "7:0", request_id=wrong),
            lambda: lake.end_schedule("orders", "7:0", request_id=wrong),
            lambda: lake.redrive("orders", subscription="a", request_id=wrong),
        ):
            with pytest.raises(ValueError, match=r"^request_id "):
                call()


def test_a_recurring_message_needs_no_time_and_has_the_properties_that_the_service_reads() -> None:
    weekly = Repeat.of("0 9 * * MON", "Europe/Berlin", NOON, 3, "skip")
    made = scheduled("orders", b"", None, None, None, None, {"region": "eu"}, None, weekly)
    assert made.deliver_at is None
    assert made.properties == {
        "region": "eu",
        "repeat": "0 9 * * MON",
        "timeZone": "Europe/Berlin",
        "repeatUntil": str(NOON_MILLIS),
        "repeatTimes": "3",
        "misfire": "skip",
    }
    Recurrence.of_properties(made.properties)
    first = scheduled(
        "orders", b"", NOON, None, None, None, None, None, Repeat.of("@every 90s", None, None, None, None)
    )
    assert (first.deliver_at, first.properties) == (NOON, {"repeat": "@every 90s", "deliverAt": str(NOON_MILLIS)})


def recurring(
    rule: Any, zone: Any = None, until: Any = None, times: Any = None, misfire: Any = None, at: datetime | None = None
) -> dict[str, str]:
    """The properties of a message that recurs."""
    repeat = Repeat.of(rule, zone, until, times, misfire)
    return scheduled("orders", b"", at, None, None, None, None, None, repeat).properties


@pytest.mark.parametrize(
    "rule",
    [
        "* * * * *",
        " 0  9\t* * MON-FRI ",
        "*/30 * * * * *",
        "0 0 L * *",
        "@every 90s",
        "@every  1.5h ",
        "@every 1000",
        "@every 1d",
        "FREQ=MONTHLY;BYDAY=-1FR",
        "rrule:freq=daily;count=3",
        "FREQ=DAILY;",
        "FREQ=DAILY;BYDAY=MO;\r\n",
    ],
)
def test_a_rule_that_the_service_reads_is_sent(rule: str) -> None:
    assert recurring(rule)["repeat"] == rule
    Recurrence.of_properties(recurring(rule))


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "tomorrow",
        "@daily",
        "* * * *",
        "* * * * * * *",
        "@every",
        "@every ",
        "@every day",
        "@every 90",
        "@every 999ms",
        "@every 1.5",
        "@every -5m",
        "@every 0s",
        "@every 999999999999d",
        "FREQ=OFTEN",
        "BYDAY=MO",
        "FREQ=DAILY COUNT",
        "0 0 * * * " + "0" * 512,
    ],
)
def test_a_rule_without_the_shape_of_one_is_refused_as_the_service_would(rule: str) -> None:
    with pytest.raises(RecurrenceError, match="repeat"):
        Recurrence(rule)
    with pytest.raises(ValueError, match=r"^repeat "):
        recurring(rule)


@pytest.mark.parametrize("zone", ["", "Berlin", "Mars/Base", "Europe", "../UTC", "/etc/passwd", "a\0b", "x" * 300])
def test_an_unknown_time_zone_is_refused_where_this_machine_knows_them(
    zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^time_zone "):
        recurring("0 9 * * *", zone)

    def find_nothing(name: str) -> None:
        raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr(scheduled_module, "ZoneInfo", find_nothing)
    assert recurring("0 9 * * *", "Europe/Berlin")["timeZone"] == "Europe/Berlin"


def test_what_goes_with_a_rule_is_checked_too() -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    assert recurring("0 9 * * *", until=NOON, at=NOON)["repeatUntil"] == str(NOON_MILLIS)
    assert recurring("0 9 * * *", until=soon, times=3)["repeatTimes"] == "3"
    wrong: list[tuple[str, Any]] = [
        ("repeat_times", {"times": 0}),
        ("repeat_times", {"times": -1}),
        ("repeat_times", {"times": 2.5}),
        ("repeat_times", {"times": True}),
        ("repeat_times", {"times": 10**18}),
        ("misfire", {"misfire": "twice"}),
        ("misfire", {"misfire": ""}),
        ("repeat_until", {"until": NOON, "at": NOON + timedelta(milliseconds=1)}),
        ("repeat_until", {"until": datetime.now(UTC) - timedelta(hours=1)}),
        ("time_zone, repeat_until, repeat_times and misfire", {"rule": None, "zone": "UTC"}),
        ("time_zone, repeat_until, repeat_times and misfire", {"rule": None, "misfire": "once"}),
    ]
    for name, arguments in wrong:
        with pytest.raises(ValueError, match=f"^{name} "):
            recurring(**{"rule": "@every 90s"} | arguments)
    with pytest.raises(TypeError, match=r"^time_zone "):
        recurring("0 9 * * *", UTC)


def test_a_message_with_a_schedule_key_has_the_properties_that_the_service_reads() -> None:
    def properties(*arguments: Any) -> dict[str, str]:
        keyed = KeyRule.of(*arguments)
        return scheduled("orders", b"", NOON, None, None, None, {"region": "eu"}, None, None, keyed).properties

    plain = {"region": "eu", "deliverAt": str(NOON_MILLIS)}
    assert properties(None, None, None) == plain
    assert properties("order-7", None, None) == plain | {"scheduleKey": "order-7"}
    for mode in Mode:
        assert key_rule(properties("order-7", mode.value, None)) == (mode, None)
    put_off = properties("ü" * (MAX_KEY_BYTES // 2), "debounce", timedelta(minutes=2, microseconds=1_999))
    assert schedule_key(put_off) == put_off[SCHEDULE_KEY]
    assert key_rule(put_off) == (Mode.DEBOUNCE, 120_001)
    wrong: list[tuple[Any, ...]] = [
        ("", None, None),
        ("ü" * (MAX_KEY_BYTES // 2) + "u", None, None),
        ("\ud800", None, None),
        ("k", "renew", None),
        ("k", "", None),
        ("k", None, timedelta(1)),
        ("k", "keep", timedelta(1)),
        ("k", "debounce", timedelta(0)),
        ("k", "debounce", timedelta(microseconds=999)),
        ("k", "debounce", timedelta(-1)),
        ("k", "debounce", timedelta.max),
        (None, "keep", None),
        (None, None, timedelta(1)),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"schedule_|debounce_max|surrogates"):
            KeyRule.of(*arguments)


def test_a_recurring_message_may_have_a_schedule_key() -> None:
    made = scheduled(
        *("orders", b"", None, None, None, None, None, None),
        Repeat.of("@every 90s", None, None, None, None),
        KeyRule.of("k", "keep", None),
    )
    assert made.properties == {"repeat": "@every 90s", "scheduleKey": "k", "scheduleMode": "keep"}


def test_a_command_names_a_message_by_its_id_or_by_its_schedule_key() -> None:
    keyed = command("skip", "orders", None, "a", "mine", "k")
    assert (keyed.topic, keyed.message, keyed.schedule_key) == ("persistent://public/default/orders", None, "k")
    moved = reschedule("orders", None, "a", "mine", NOON, None, "k")
    assert (moved.schedule_key, moved.fields) == ("k", {"deliver_at": NOON_MILLIS})
    assert cancel("orders", None, None, None, None, "k").schedule_key == "k"
    assert not command("skip", "orders", "7:0", "a", None).schedule_key
    with pytest.raises(ValueError, match="deliver_at goes with"):
        cancel("orders", None, None, None, NOON, "k")
    for wrong, what in (
        (("7:0", "k"), "not by both"),
        ((None, None), "names its message"),
        ((None, ""), "empty"),
        ((None, "k" * (MAX_KEY_BYTES + 1)), "512 bytes"),
    ):
        message, key = wrong
        with pytest.raises(ValueError, match=what):
            command("skip", "orders", message, "a", None, key)
        with pytest.raises(ValueError, match=what):
            cancel("orders", message, "a", None, None, key)


def test_a_cancel_by_schedule_key_does_not_wait_for_its_message() -> None:
    assert cancel("orders", "7:0", None, None, NOON).is_done_by("WAITING")
    assert not cancel("orders", None, None, None, None, "k").is_done_by("WAITING")


def test_a_client_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="needed"):
        Client()
    for url in ("", "127.0.0.1:8081", "ftp://host", "http://", "http://host:port"):
        with pytest.raises(ValueError, match="http://"):
            Client(url)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout_seconds"):
            Client("http://127.0.0.1:1", timeout_seconds=seconds)
    with Client(broker="pulsar://127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="admin API"):
            list(client.pending("orders"))
        for call in (client.skip, client.skip_next, client.pause_schedule):
            for nobody in (None, "*"):
                with pytest.raises(ValueError, match="subscription"):
                    call("orders", "7:0", subscription=nobody)
        with pytest.raises(ValueError, match="admin API"):
            client.end_schedule("orders", "7:0")
    with Client("http://127.0.0.1:1") as client:
        for wrong in ({"state": "asleep"}, {"limit": 0}, {"limit": 1.5}):
            with pytest.raises(ValueError, match="must be"):
                client.pending("orders", **wrong)
        with pytest.raises(ValueError, match="must be"):
            client.schedules("orders", limit=0)


def test_a_listing_is_not_filtered_by_a_property_that_the_api_would_read_as_another() -> None:
    """Up to the first `=` is the name."""
    lake, awaited = Client("http://127.0.0.1:1"), AsyncClient("http://127.0.0.1:1")
    for name in ("a=b", "=", ""):
        for ask in (lake.pending, awaited.pending):
            with pytest.raises(ValueError, match=f"^properties are .*{name!r}$"):
                ask("orders", properties={name: "c"})
    call = listing("orders", None, None, None, None, {"a": "b=c", "ü ": ""}, "waiting", None).first()
    assert call.params["property"] == ["a=b=c", "ü ="]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("way", [{"url": "http://127.0.0.1:1"}, {"broker": "pulsar://127.0.0.1:1"}])
def test_a_client_that_is_closed_says_so_at_once(kind: type[Any], way: dict[str, str]) -> None:
    made = kind(**way)
    with awaited(made) if kind is AsyncClient else made as lake:
        lake.close()
        there: Any = {"subscription": "a"}
        for call in (
            lambda: lake.schedule("orders", b"", at=NOON),
            lambda: lake.cancel("orders", "7:0", deliver_at=NOON, **there),
            lambda: lake.skip("orders", "7:0", **there),
            lambda: lake.end_schedule("orders", "7:0", **there),
            lambda: lake.redrive("orders", **there),
            lambda: lake.get("orders", "7:0"),
            lambda: lake.pending("orders"),
            lambda: lake.schedules("orders"),
        ):
            with pytest.raises(RuntimeError, match="the client is closed"):
                call()
        lake.close()


def test_both_clients_have_the_same_methods() -> None:
    """With the same parameters, defaults and results; to be awaited, or, where it is a listing, gone through so."""

    def methods(of: type) -> dict[str, inspect.Signature]:
        found = inspect.getmembers(of, inspect.isfunction)
        return {name: inspect.signature(method) for name, method in found if not name.startswith("_")}

    of_client, of_async = methods(Client), methods(AsyncClient)
    assert len(of_client) > 15
    assert of_async.keys() == of_client.keys()
    answers = {"_Sent": MessageId, "_Answer": list[Outcome], "_Counts": Redriven}
    listed = {"_Messages": PendingMessage, "_Schedules": Schedule}
    [of_one, of_other] = [
        next(get_args(base) for base in vars(client)["__orig_bases__"] if get_origin(base) is Methods)
        for client in (Client, AsyncClient)
    ]
    assert [*of_one[:3]] == list(answers.values())
    assert [get_args(awaited)[2] for awaited in of_other[:3]] == list(answers.values())
    for given, iterator in ((of_one, Iterator), (of_other, AsyncIterator)):
        assert [(get_origin(one), *get_args(one)) for one in given[3:]] == [
            (iterator, kind) for kind in listed.values()
        ]
    for name, signature in of_client.items():
        other = of_async[name]
        if signature.return_annotation in {**answers, **listed}:
            assert getattr(AsyncClient, name) is getattr(Client, name), name
            continue
        assert other.parameters == signature.parameters, name
        is_awaited = inspect.iscoroutinefunction(getattr(AsyncClient, name))
        assert is_awaited != str(signature.return_annotation).startswith("Iterator["), name
        assert other.return_annotation.removeprefix("Async") == signature.return_annotation, name
