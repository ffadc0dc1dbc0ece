"""Messages with schedule keys, recurring ones and others for a subscription with a rate or windows, and an order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.naive.key_order_history import Came, violations
from tests.support.naive.rates import most_within
from tests.support.service.key_order_service import ENTRY, Service, settings_of

RATES: list[dict[str, Any]] = [
    {"rate": {"messages_per_second": 4, "burst": 2}},
    {"rate": {"messages_per_second": 10, "burst": 1}},
    {"windows": [{"from": "00:17"}]},  # the service's clock begins at 00:16:40
    {},
]
TIMES = 3  # that a recurring message is delivered
MODES = ["replace", "keep", "debounce"]

New = tuple[str, int, int]  # what kind of message, its key, its delay in ms

NEW = st.tuples(
    st.sampled_from(["plain", "recurs", *MODES]), st.integers(1, 3), st.integers(-2, 40).map(lambda n: n * 100)
)
HISTORY = st.lists(
    st.tuples(
        st.integers(1, 9).map(lambda n: n * 100),
        st.lists(NEW, max_size=4),
        st.integers(0, 25),  # messages that are sent then
        st.integers(0, 12).map(lambda n: n == 0),  # a crash before
    ),
    min_size=2,
    max_size=12,
)


def message(service: Service, kind: str, key: int, due: int, published: int) -> pa.Table:
    """The next message, for the key and, unless it is plain or recurs, for one of two schedule keys."""
    given: dict[str, str] = {}
    columns: dict[str, object] = {"publish_time": published}
    if kind == "recurs":
        given = {"repeat": "@every 2s", "repeatTimes": str(TIMES), "deliverAt": str(due), "misfire": "all"}
        columns["occurrence"] = 1
    elif kind in MODES:
        columns["schedule_key"] = f"s{key % 2}"
        given = {"scheduleKey": f"s{key % 2}", "scheduleMode": kind, "debounceMax": "3s"}
    return service.message(key, due, properties=list(given.items()), **columns)


@pytest.mark.slow
@effort(max_examples=examples(120), deadline=None)
@given(HISTORY, st.integers(0, 1 << 30), st.integers(1, 3), st.sampled_from(RATES))
def test_each_comes_once_or_is_superseded_in_order_and_within_the_rate(
    history: list[tuple[int, list[New], int, bool]], seed: int, shards: int, shaped: dict[str, Any]
) -> None:
    service = Service(seed, settings_of(**shaped), shards)
    kinds: list[str] = []
    for later, new, steps, is_crash in history:
        if is_crash:
            service.start()
        now = service.now + later
        rows = [message(service, kind, key, now + delay, now) for kind, key, delay in new]
        kinds += [kind for kind, _, _ in new]
        service.tick_all(later, rows)
        for _ in range(steps):
            service.step()
    for _ in range(100):
        service.tick_all(500)
        for _ in range(200):
            service.step()
    service.finish()

    for name in ("one", "other"):
        came = Counter((one.position[1] // ENTRY, one.occurrence) for one in service.came(name))
        superseded = {n for (what, n, of), _ in service.applied.items() if (what, of) == ("SUPERSEDED", name)}
        assert all(kinds[n] in MODES for n in superseded)
        expected: Counter[tuple[int, int | None]] = Counter(
            (n, None) for n, kind in enumerate(kinds) if kind != "recurs" and n not in superseded
        )
        expected += Counter((n, i + 1) for n, kind in enumerate(kinds) if kind == "recurs" for i in range(TIMES))
        assert came == expected
    assert violations(service.came("one")) == []
    if (rate := shaped.get("rate")) and not any(is_crash for *_, is_crash in history):
        at = [float(_at(service, one)) for one in service.came("one")]
        assert most_within(at, 1_000 - 1e-6) <= rate["messages_per_second"] + rate["burst"]
    if "windows" in shaped:
        assert all(_at(service, one) >= 17 * 60_000 for one in service.came("one"))


@pytest.mark.slow
def test_an_occurrence_that_is_late_waits_for_the_window_too_and_says_when_it_was_due() -> None:
    service = Service(0, settings_of(windows=[{"from": "00:17"}]))
    opens_at = 17 * 60_000
    service.tick_all(100, [message(service, "recurs", 1, service.now, service.now)])
    handed_out = []
    for _ in range(60):
        for effects in service.tick_all(500):
            for release in effects.releases:
                handed_out += [row for row in release.rows.to_pylist() if row["subscription"] == "one"]
        while service.step():
            pass
    came = service.came("one")
    assert [one.occurrence for one in came] == [1, 2, 3]
    assert all(_at(service, one) >= opens_at for one in came)
    assert [row["shaped_from"] < opens_at for row in handed_out] == [True] * TIMES


def _at(service: Service, one: Came) -> int:
    """When it goes out: what was overdue goes at once."""
    return max(one.due, service.times[one.tick])
