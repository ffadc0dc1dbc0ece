"""What is made of the jobs of other systems, as those write them, and that nothing they may hold stops an import."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_from_tables.other_systems import bullmq, celery, rq, sidekiq
from checkpoint_from_tables.other_systems.importing import _rows
from checkpoint_from_tables.other_systems.item import Item, iso_millis, item

SECONDS = 1_800_000_000.25
MILLIS = 1_800_000_000_250

SIDEKIQ = {
    "retry": True,
    "queue": "mailers",
    "class": "ActiveJob::QueueAdapters::SidekiqAdapter::JobWrapper",
    "wrapped": "WelcomeMail",
    "args": [{"job_id": "a", "arguments": ["Jürgen"]}],
    "jid": "b4a577edbccf1d805744efa9",
    "created_at": 1_700_000_000.1,
}
BULLMQ = {"name": b"encode", "data": b'{"f":1}', "timestamp": b"1700000000000", "delay": b"3600000"}
CELERY_BODY = b'[[1, 2], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
CELERY = {
    "body": base64.b64encode(CELERY_BODY).decode(),
    "content-encoding": "utf-8",
    "content-type": "application/json",
    "headers": {
        "lang": "py",
        "task": "add",
        "id": "0775cc01",
        "eta": "2027-01-15T08:00:00.250000+00:00",
        "expires": None,
        "retries": 0,
    },
    "properties": {"delivery_info": {"exchange": "", "routing_key": "celery"}, "body_encoding": "base64"},
}


def dumped(value: dict[str, Any], **changed: Any) -> bytes:
    return json.dumps(value | changed).encode()


def test_a_job_of_sidekiq_is_its_json_as_it_is() -> None:
    member = dumped(SIDEKIQ, retry_count=2)
    queue, found = sidekiq.job(member, SECONDS)
    assert queue == "mailers"
    assert (found.id, found.due, found.payload, found.reason) == (f"sidekiq:{SIDEKIQ['jid']}", MILLIS, member, None)
    properties = {"class": "WelcomeMail", "jid": SIDEKIQ["jid"], "queue": "mailers", "retryCount": "2"}
    assert found.properties == properties


@pytest.mark.parametrize(
    ("expiry", "end"), [(SECONDS + 60.25, str(MILLIS + 60_250)), (None, None), ("soon", None), (True, None), (-1, None)]
)
def test_a_job_of_sidekiq_that_expires_does_so_here(expiry: object, end: str | None) -> None:
    _, found = sidekiq.job(dumped(SIDEKIQ, expiry=expiry), SECONDS)
    assert (found.properties.get("expireAt"), found.reason) == (end, None)


@pytest.mark.parametrize("member", [b"", b"[]", b"\xff", b"{}", dumped(SIDEKIQ, jid=7), b"[" * 100_000])
def test_what_is_no_job_of_sidekiq_is_kept_whole_with_the_reason(member: bytes) -> None:
    _, found = sidekiq.job(member, SECONDS)
    assert (found.payload, found.reason) == (member, "no JSON object with a jid")
    assert found.id == sidekiq.job(member, SECONDS)[1].id
    assert found.id != sidekiq.job(member + b" ", SECONDS)[1].id


def test_a_time_that_is_none_and_text_that_is_none_are_reasons() -> None:
    assert sidekiq.job(dumped(SIDEKIQ), float("inf"))[1].reason == "inf is no time"
    assert sidekiq.job(dumped(SIDEKIQ, jid="\ud800"), 1.0)[1].reason == "its id, key or properties are no Unicode text"
    assert sidekiq.job(dumped(SIDEKIQ, queue=[]), 1.0)[1].reason == "its queue is no text"


def test_a_job_of_bullmq_is_its_data_and_known_by_queue_id_and_creation() -> None:
    score = MILLIS * 4096 + 17
    found = bullmq.job("bull:video:", "video", b"7", float(score), BULLMQ)
    assert found is not None
    assert (found.id, found.due, found.payload) == ("bullmq:bull:video:7:1700000000000", MILLIS, b'{"f":1}')
    assert found.properties == {"queue": "video", "jobId": "7", "name": "encode"}
    later = bullmq.job("bull:video:", "video", b"7", float(score), BULLMQ | {"timestamp": b"1700000000001"})
    assert later is not None
    assert later.id != found.id
    gone = bullmq.job("bull:video:", "video", b"7", 1.0, {})
    assert gone is not None
    assert gone.reason == "its hash is not there, or has no data"


def repeated(options: object, due: int = MILLIS, name: bytes = b"repeat:ab:1", **more: bytes) -> Item | None:
    fields = BULLMQ | {"opts": json.dumps(options).encode()} | more
    return bullmq.job("bull:q:", "q", name, float(due * 4096), fields)


NINE = 1_800_003_600_000  # 2027-01-15 at 9 o'clock in UTC


@pytest.mark.parametrize(
    ("options", "due", "properties"),
    [
        ({"repeat": {"every": 60_000, "count": 3}}, MILLIS, {"repeat": "@every 60000ms", "timeZone": "UTC"}),
        ({"repeat": {"cron": "0 9 * * *"}}, NINE, {"repeat": "0 9 * * *", "timeZone": "UTC"}),
        (
            {"repeat": {"pattern": "0 0 10 * * *", "tz": "Europe/Berlin", "limit": 5, "count": 2, "endDate": 2 * NINE}},
            NINE,
            {
                **{"repeat": "0 0 10 * * *", "timeZone": "Europe/Berlin"},
                **{"repeatTimes": "4", "repeatUntil": str(2 * NINE)},
            },
        ),
        (
            {"repeat": {"every": "5000", "endDate": "2030-01-01T00:00:00.000Z"}},
            MILLIS,
            {"repeat": "@every 5000ms", "timeZone": "UTC", "repeatUntil": "1893456000000"},
        ),
    ],
)
def test_the_next_run_of_a_repeatable_job_of_bullmq_recurs_by_its_rule(
    options: object, due: int, properties: dict[str, str]
) -> None:
    found = repeated(options, due)
    assert found is not None
    assert (found.due, found.reason) == (due, None)
    assert properties.items() <= found.properties.items()
    assert found.id == "bullmq:bull:q:repeat:ab", "the same at each of its runs"
    assert repeated(options, due, rjk=b"mine") is not None


@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"repeat": 7},
        {"repeat": {}},
        {"repeat": {"every": 10}},
        {"repeat": {"every": None, "pattern": 5}},
        {"repeat": {"pattern": "0 9 * * *"}},  # of the server's own zone: it is due at eight, in UTC
        {"repeat": {"pattern": "0 8 * * *", "tz": "Mars/Base"}},
        {"repeat": {"pattern": "soon"}},
        {"repeat": {"every": 60_000, "endDate": "soon"}},
        {"repeat": {"every": 60_000, "limit": 2, "count": 9}},
    ],
)
def test_the_next_run_by_a_rule_that_no_message_can_have_is_left(options: object) -> None:
    assert repeated(options, NINE - 3_600_000 + 1) is None


def test_a_run_that_is_tried_again_recurs_not_once_more() -> None:
    found = repeated({"repeat": {"every": 60_000}}, atm=b"1")
    assert found is not None
    assert "repeat" not in found.properties
    assert found.properties["attemptsMade"] == "1"
    gone = bullmq.job("bull:q:", "q", b"repeat:ab:1", 1.0, {"rjk": b"x"})
    assert gone is not None
    assert gone.reason == "its hash is not there, or has no data"


@pytest.mark.slow
def test_a_job_of_rq_is_what_its_serializer_made_and_is_not_unpickled() -> None:
    data = pickle.dumps(("mail.send", None, (5,), {}))
    fields = {"data": zlib.compress(data), "origin": b"mail", "description": b"mail.send(5)", "timeout": b"180"}
    found = rq.job(b"fa8c", SECONDS, fields)
    assert found is not None
    assert (found.id, found.due, found.payload) == ("rq:fa8c", MILLIS, data)
    assert found.properties == {"jobId": "fa8c", "queue": "mail", "description": "mail.send(5)", "timeout": "180"}
    bomb, whole = zlib.compress(bytes(65 << 20)), zlib.compress(data)
    for content, payload, reason in (
        (data, data, None),  # as it is
        (None, None, "its hash is not there, or has no data"),
        (bomb, bomb, f"it has more than {64 << 20} bytes"),
        *((whole[:n], whole[:n], "its data is cut off: a zlib stream without its end") for n in range(len(whole))),
    ):
        other = rq.job(b"fa8c", SECONDS, {} if content is None else fields | {"data": content})
        assert other is not None
        assert (other.payload, other.reason) == (payload, reason)


@pytest.mark.parametrize(
    ("fields", "properties"),
    [
        ({"repeats_left": b"2", "repeat_intervals": b"[60]"}, {"repeat": "@every 60000ms", "repeatTimes": "3"}),
        ({"repeats_left": b"1", "repeat_intervals": b"[60, 60]"}, {"repeat": "@every 60000ms", "repeatTimes": "2"}),
        ({"repeats_left": b"0", "repeat_intervals": b"[60]"}, {}),
        ({"repeats_left": b""}, {}),
        ({"repeats_left": b"2", "repeat_intervals": b"[60, 90]"}, None),
        ({"repeats_left": b"2", "repeat_intervals": b"[0]"}, None),
        ({"repeats_left": b"2", "repeat_intervals": b"{}"}, None),
        ({"repeats_left": b"many", "repeat_intervals": b"[60]"}, None),
        ({"repeats_left": b"2"}, None),
        ({"repeats_left": b"2", "repeat_intervals": b"[1e999]"}, None),
        ({"repeats_left": b"2", "repeat_intervals": b'{"a": 1}'}, None),
    ],
)
def test_a_job_of_rq_that_repeats_recurs_by_its_interval(
    fields: dict[str, bytes], properties: dict[str, str] | None
) -> None:
    found = rq.job(b"fa8c", SECONDS, {"data": zlib.compress(b"x")} | fields)
    assert (found is None) == (properties is None)
    if found is not None and properties is not None:
        assert properties.items() <= found.properties.items()
        assert ("repeat" in found.properties) == bool(properties)


class Evil:
    """As what a pickle may call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was called",))


@pytest.mark.parametrize(
    ("meta", "properties"),
    [
        (None, {}),
        (pickle.dumps({}), {}),
        (pickle.dumps({"interval": 60}), {"repeat": "@every 60000ms"}),
        (b'{"interval": 60, "repeat": 4}', {"repeat": "@every 60000ms", "repeatTimes": "4"}),
        (pickle.dumps({"cron_string": "0 9 * * *", "repeat": None}), {"repeat": "0 9 * * *"}),
        (pickle.dumps({"cron_string": "0 10 * * *", "use_local_timezone": True}), None),
        (pickle.dumps({"interval": "x"}), None),
        (b'{"interval": NaN}', None),
        (pickle.dumps({"interval": 10**5000}), None),
    ],
)
def test_a_job_of_rq_scheduler_that_repeats_recurs_by_its_meta(
    meta: bytes | None, properties: dict[str, str] | None
) -> None:
    fields = {"data": zlib.compress(b"x")} | ({} if meta is None else {"meta": meta})
    found = rq.job(b"fa8c", NINE / 1000, fields, is_of_scheduler=True)
    assert (found is None) == (properties is None)
    if found is not None and properties is not None:
        assert properties.items() <= found.properties.items()


@pytest.mark.parametrize("meta", [b"\xff", pickle.dumps({"interval": Evil()}), b"[1]", b"\x80\x05K"])
def test_meta_that_would_call_something_is_not_loaded(meta: bytes) -> None:
    found = rq.job(b"fa8c", SECONDS, {"data": zlib.compress(b"x"), "meta": meta}, is_of_scheduler=True)
    assert found is not None
    assert found.reason == "its meta can't be read, which says whether it repeats"
    assert rq.job(b"fa8c", SECONDS, {"data": zlib.compress(b"x"), "meta": meta}) is not None


class FakeRedis:
    """Answers as redis-py does, of sorted sets and hashes that are given."""

    def __init__(self, sets: dict[str, dict[bytes, float]], hashes: dict[bytes, dict[str, bytes]]) -> None:
        self._sets = sets
        self._hashes = hashes
        self._asked: list[list[bytes | None]] = []

    def scan_iter(self, match: str, **_: Any) -> list[bytes]:
        begin, end = match.replace("\\", "").split("*")
        return [key.encode() for key in self._sets if key.startswith(begin) and key.endswith(end)]

    def zscan_iter(self, key: str, count: int) -> Iterator[tuple[bytes, float]]:
        return iter(self._sets.get(key, {}).items())

    def pipeline(self, transaction: bool) -> FakeRedis:
        return self

    def hmget(self, key: bytes, *fields: str) -> None:
        self._asked.append([self._hashes.get(key, {}).get(field) for field in fields])

    def execute(self) -> list[list[bytes | None]]:
        answers, self._asked = self._asked, []
        return answers


@pytest.mark.parametrize(
    ("queues", "taken", "left"),
    [
        ([], ["1", "2", "3", "5", "6"], {}),
        (["mail"], ["1", "5"], {"of other queues": 2}),
        (["video"], ["2", "3"], {"of other queues": 3}),
    ],
)
def test_of_a_job_of_rq_that_is_gone_it_is_told_whichever_queues_are_asked_for(
    queues: list[str], taken: list[str], left: dict[str, int]
) -> None:
    data = zlib.compress(b"x")
    scheduled = {
        "rq:scheduled:mail": {b"1": 1.0, b"gone": 1.0},
        "rq:scheduled:video": {b"2": 1.0, b"3": 1.0, b"gone": 1.0},
        "rq:scheduler:scheduled_jobs": {b"5": 1.0, b"6": 1.0, b"gone there": 1.0, b"3": 1.0},
    }
    jobs = {b"1": b"mail", b"2": b"video", b"3": None, b"5": b"mail", b"6": b"other"}
    hashes = {b"rq:job:" + id: {"data": data} | ({"origin": of} if of else {}) for id, of in jobs.items()}
    source = rq.RQ(FakeRedis(scheduled, hashes), queues, "")
    found = list(source.items())
    bad = {one.id for one in found if one.reason == "its hash is not there, or has no data"}
    assert bad == {"rq:gone", "rq:gone there"}
    assert sorted({one.id.removeprefix("rq:") for one in found if one.reason is None}) == taken
    assert source.left == left


def test_a_task_of_celery_is_its_body() -> None:
    found = celery.task(dumped(CELERY), "celery")
    assert found is not None
    assert (found.id, found.due, found.payload) == ("celery:0775cc01", MILLIS, CELERY_BODY)
    about = {"task": "add", "taskId": "0775cc01", "queue": "celery"}
    assert found.properties == about | {"contentType": "application/json", "contentEncoding": "utf-8"}
    plain = celery.task(dumped(CELERY, body="x", properties={}), "celery")
    assert plain is not None
    assert plain.payload == b"x"
    headers = CELERY["headers"]
    assert celery.task(dumped(CELERY, headers=headers | {"eta": None}), "celery") is None  # type: ignore[operator]
    for expires, end in (("2030-01-31T12:00:00+00:00", "1896091200000"), ("no time", None), (7, None), (None, None)):
        found = celery.task(dumped(CELERY, headers=headers | {"expires": expires}), "celery")  # type: ignore[operator]
        assert found is not None
        assert found.properties.get("expireAt") == end


def of_protocol_1(body: bytes, **more: Any) -> Item | None:
    return celery.task(dumped(CELERY, body=base64.b64encode(body).decode(), headers={}, **more), "celery")


def test_a_task_of_protocol_1_has_its_eta_in_its_body() -> None:
    body = {"task": "add", "id": "e30c", "args": [1], "retries": 2, "eta": "2027-01-15T09:00:00.250+01:00"}
    body["expires"] = "2030-01-31T12:00:00+00:00"
    found = of_protocol_1(json.dumps(body).encode())
    assert found is not None
    assert (found.id, found.due, found.payload, found.reason) == (
        *("celery:e30c", MILLIS),
        *(json.dumps(body).encode(), None),
    )
    about = {"task": "add", "taskId": "e30c", "retries": "2", "expireAt": "1896091200000"}
    assert about.items() <= found.properties.items()
    assert of_protocol_1(json.dumps(body | {"eta": None}).encode()) is None
    assert of_protocol_1(b"[]") is None, "a message of kombu's that is no task"
    for content in (pickle.dumps(body), b"", b"\xff"):
        unknown = of_protocol_1(content)
        assert unknown is not None
        assert unknown.reason == "its headers name no task, as of protocol 1, and its body is no JSON"


def test_a_task_tells_that_its_body_is_compressed() -> None:
    headers = CELERY["headers"] | {"compression": "application/x-gzip"}  # type: ignore[operator]
    body = zlib.compress(CELERY_BODY)
    found = celery.task(dumped(CELERY, body=base64.b64encode(body).decode(), headers=headers), "celery")
    assert found is not None
    assert (found.payload, found.properties["compression"]) == (body, "application/x-gzip")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"headers": None}, "no JSON object with headers"),
        ({"headers": {"eta": "2027-01-15T08:00:00"}}, "its headers have no id"),
        ({"headers": {"id": "1", "eta": "soon"}}, "its eta soon is no time"),
        ({"headers": {"id": "1", "eta": 5}}, "its eta 5 is no time"),
        ({"body": None}, "its body is no text"),
        ({"body": "!"}, "its body can't be decoded"),
    ],
)
def test_what_is_no_task_of_celery_is_kept_with_the_reason(changed: dict[str, Any], reason: str) -> None:
    found = celery.task(dumped(CELERY, **changed), "celery")
    assert found is not None
    assert (found.reason, found.payload) == (reason, dumped(CELERY, **changed))


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("2027-01-15T08:00:00.250Z", MILLIS),
        ("2027-01-15T09:00:00.250+01:00", MILLIS),
        ("2027-01-15 08:00:00.25", MILLIS),
        ("0001-01-01T00:00:00+14:00", -62_135_647_200_000),
        ("soon", None),
    ],
)
def test_times_in_iso_8601_are_utc_where_they_name_no_zone(text: str, millis: int | None) -> None:
    assert iso_millis(text) == millis


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


OF_JOBS = ["name", "data", "origin", "timestamp", "atm", "description", "opts", "rjk", "meta", "repeats_left"]


def storable(found: Item | None) -> None:
    """An item has an id and goes into a row, whatever it was made of."""
    if found is not None:
        assert found.id
        assert _rows("t", 1, [found]).num_rows == 1


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from([*SIDEKIQ, "retry_count"]), JSON),
    st.dictionaries(st.sampled_from([*CELERY, "x"]), JSON),
    st.dictionaries(st.sampled_from(["id", "eta", "task", "retries"]), JSON),
    st.floats(),
    st.binary(max_size=20),
    st.dictionaries(st.sampled_from(OF_JOBS), st.binary()),
)
def test_nothing_that_a_system_may_hold_stops_an_import(
    job: dict[str, Any], message: dict[str, Any], headers: dict[str, Any], score: float, name: bytes, fields: Any
) -> None:
    storable(sidekiq.job(json.dumps(job).encode(), score)[1])
    storable(sidekiq.job(json.dumps(SIDEKIQ | job).encode(), score)[1])
    storable(sidekiq.job(name, score)[1])
    storable(celery.task(json.dumps(CELERY | message).encode(), "celery"))
    storable(celery.task(json.dumps(CELERY | {"headers": CELERY["headers"] | headers}).encode(), "celery"))  # type: ignore[operator]
    storable(bullmq.job("bull:q:", "q", name, score, fields))
    storable(rq.job(name, score, fields))
    storable(rq.job(name, score, fields, is_of_scheduler=True))


@given(st.floats(), st.text(st.characters(), max_size=3))
def test_an_item_is_due_at_the_next_millisecond_and_never_early(due: float, value: str) -> None:
    found = item("id", due, b"", {"colour": value}, value)
    storable(found)
    if found.reason is None:
        assert found.due is not None
        assert -0.001 <= found.due - due <= 1
