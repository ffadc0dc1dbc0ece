"""Order per key through retries, pauses, rates and windows, commands and crashes, read from a destination's history."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from tests.support.fuzzing.examples import examples
from tests.support.naive.key_order_history import Came, violations
from tests.support.service.key_order_service import ENTRY, Service, settings_of
from tests.support.tracker.messages import TOPIC, command
from tracker.commands.kinds import CANCEL, RESCHEDULE, RETRY
from tracker.schemas import PauseChange

MANY_RETRIES = {"backoff": {"first": 700, "attempts": 1_000}}
SHAPED: list[dict[str, Any]] = [
    {},
    {"rate": {"messages_per_second": 4, "burst": 2}},
    {"rate": {"messages_per_second": 3, "burst": 1, "per": "key"}},
    {"windows": [{"to": "00:17"}]},  # the service's clock begins at 00:16:40
    {"rate": {"messages_per_second": 8}, "windows": [{"to": "00:17"}]},
]
DAY = 24 * 3_600_000

Action = tuple[str, int, int]  # what, the entry, a time, ms

ACTIONS = st.tuples(
    st.sampled_from([CANCEL, RESCHEDULE, RESCHEDULE, RETRY, "send back", "pause", "resume", ""]),
    st.integers(0, 200),
    st.integers(-5, 50).map(lambda n: n * 100),
)
HISTORY = st.lists(
    st.tuples(
        st.integers(1, 9).map(lambda n: n * 100),  # so that many are due at the same time
        st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 45).map(lambda n: n * 100)), max_size=5),
        ACTIONS,
        st.integers(0, 25),  # messages that are sent then
        st.integers(0, 9).map(lambda n: n == 0),  # a crash before
    ),
    min_size=2,
    max_size=20,
)

Step = tuple[int, list[tuple[int, int]], Action, int, bool]


class Story:
    """A service to which a history happens, and how often each message is to come.

    Args:
        seed: of the service.
        shards: how many there are.
        shaped: rate and windows of the subscription `one`.
    """

    def __init__(self, seed: int, shards: int, shaped: dict[str, Any]) -> None:
        self.service = Service(seed, settings_of(**MANY_RETRIES, **shaped), shards)
        self.sent_back: set[int] = set()
        self.keys: list[int] = []
        self.named: set[int] = set()  # entries that commands have moved
        self.requests = 0

    def go_on(self, later: int, entries: list[tuple[int, int]], action: Action, steps: int, is_crash: bool) -> None:
        if is_crash:
            self.service.start()
        what, entry, millis = action
        now, self.requests = self.service.now + later, self.requests + 1
        rows = [self.service.message(key, now + delay) for key, delay in entries]
        self.keys += [key for key, _ in entries]
        orders, pauses = [], []
        if what in ("pause", "resume"):
            pauses.append(PauseChange(f"r{self.requests}", TOPIC, 1, what == "pause"))
        elif what == "send back" and self.keys:
            rows.append(self.service.message(key := self.keys[entry % len(self.keys)], 0, **_sent_back(millis)))
            self.sent_back.add(len(self.keys))
            self.keys.append(key)
        elif what == RETRY:  # a consumer that has the message asks for it
            if arrived := [one.position[1] for one in self.service.came("one")]:
                order = command(f"r{self.requests}", 1, arrived[entry % len(arrived)], (0,), kind=RETRY)
                self.named.add(arrived[entry % len(arrived)] // ENTRY)
                orders.append(order | {"after_millis": max(1, millis), "reason": "no"})
        elif what and self.keys:
            time = now + millis if what == RESCHEDULE else None
            at = entry % len(self.keys) * ENTRY
            self.named.add(entry % len(self.keys))
            orders.append(command(f"r{self.requests}", 1, at, (0,), cancel_at=time, kind=what))
        self.service.tick_all(later, rows, orders, pauses)
        for _ in range(steps):
            self.service.step()

    def end(self) -> None:
        """Lets everything come that is still to come."""
        self.go_on(5_000, [], ("resume", 0, 0), 0, True)
        for later in [900] * 10 + [DAY - 60_000] + [900] * 100:
            if sum(self.expected("one").values()) == len(self.service.came("one")):
                break
            self.go_on(later, [], ("", 0, 0), 1_000, False)
        self.service.finish()

    def expected(self, name: str) -> Counter[int]:
        applied = self.service.applied
        counts = Counter({n: 1 for n in range(len(self.keys)) if name == "one" or n not in self.sent_back})
        for (operation, entry, subscription), n in applied.items():
            if subscription == name and operation in ("CANCEL", "RETRY"):
                counts[entry] += n if operation == "RETRY" else -n
        return +counts

    def came(self, name: str) -> list[Came]:
        return [one for one in self.service.came(name) if one.key]

    def passed(self) -> list[tuple[Came, Came]]:
        """Pairs of messages of a key of which the first came due while the second, held back before, was going out.

        Of one that was due in the very millisecond in which the others were let go, the rank decides.
        """
        times, came = self.service.times, self.came("one")
        return [
            (first, then)
            for i, first in enumerate(came)
            for then in came[i + 1 :]
            if (first.was_due is None) > (then.was_due is None)
            and (first.key, then.attempt) == (then.key, None)
            and first.since is not None
            and then.since is not None
            and then.since <= first.tick
            and first.due > times[then.since]
        ]

    def overtaken(self) -> list[tuple[Came, Came]]:
        """Pairs of messages of a key of which the second was due before the first, and was held back when that went.

        Without those that commands have moved, retries, and what is shaped.
        """
        plain = [
            (one, number)
            for one in self.came("one")
            if one.since is not None
            and one.attempt is None
            and (number := one.position[1] // ENTRY) not in self.named | self.sent_back
        ]
        return [
            (first, then)
            for i, (first, _) in enumerate(plain)
            for then, number in plain[i + 1 :]
            if (first.key, first.was_due) == (then.key, None)
            and then.was_due is not None
            and then.was_due < first.due
            and self.service.taken_in[number] < first.tick
        ]


def _sent_back(after: int) -> dict[str, object]:
    given = [("retryOf", "1:0:-1:-1"), ("retrySubscription", "one"), ("retryAfter", str(max(1, after)))]
    return {"attempt": 1, "retry_reasons": "[]", "properties": given}


@pytest.mark.slow
@effort(max_examples=examples(300), deadline=None)
@given(HISTORY, st.integers(0, 1 << 30), st.integers(1, 3), st.sampled_from(SHAPED), st.sampled_from([2, 1_000]))
def test_messages_of_a_key_come_in_order_and_once_whatever_is_done_to_them(
    history: list[Step], seed: int, shards: int, shaped: dict[str, Any], round_rows: int
) -> None:
    story = Story(seed, shards, shaped)
    story.service.round_rows = round_rows
    for step in history:
        story.go_on(*step)
    story.end()
    for name in ("one", "other"):
        came = story.service.came(name)
        assert Counter(one.position[1] // ENTRY for one in came) == story.expected(name)
        assert len({(one.position, one.attempt) for one in came}) == len(came)
    assert violations(story.came("one")) == []
    assert story.passed() == []
    assert story.overtaken() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "parked", "with_resume", "afterwards"),
    [
        (1, [(2, 300)], [(1, 0), (1, 100)], []),
        (1, [(2, 300)], [(1, 0)], [(1, 0)]),
        # The message that is parked is not sealed yet, and the late one is in another shard.
        (3, [(1, -100)], [(1, -200)], []),
    ],
)
def test_what_comes_late_in_the_tick_of_a_resume_goes_by_when_it_was_due(
    shards: int, parked: list[tuple[int, int]], with_resume: list[tuple[int, int]], afterwards: list[tuple[int, int]]
) -> None:
    story = Story(0, shards, {})
    story.go_on(100, [], ("", 0, 0), 0, False)
    story.go_on(100, parked, ("pause", 0, 0), 0, False)
    story.go_on(400, with_resume, ("resume", 0, 0), 0, False)
    story.go_on(100, afterwards, ("", 0, 0), 0, False)
    story.service.finish()
    came = [one.position[1] // ENTRY for one in story.came("one") if one.key == b"k1"]
    assert came == sorted(came)
    assert Counter(one.position[1] // ENTRY for one in story.came("one")) == story.expected("one")
    assert (story.passed(), story.overtaken()) == ([], [])


@pytest.mark.slow
@effort(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(25, 60).map(lambda n: n * 100)), min_size=2, max_size=12),
    st.lists(st.tuples(st.integers(0, 25), st.booleans()), max_size=12),
    st.integers(0, 1 << 30),
    st.sampled_from(SHAPED),
)
def test_places_of_one_shard_are_in_the_order_in_which_messages_were_due(
    entries: list[tuple[int, int]], ticks: list[tuple[int, bool]], seed: int, shaped: dict[str, Any]
) -> None:
    story = Story(seed, 1, shaped)
    story.go_on(1, entries, ("", 0, 0), 0, False)
    for steps, is_crash in ticks:
        story.go_on(600, [], ("", 0, 0), steps, is_crash)
    story.end()
    for key in {key for key, _ in entries}:
        came = [one.position[1] // ENTRY for one in story.came("one") if one.key == f"k{key}".encode()]
        due = [(delay, n) for n, (of_key, delay) in enumerate(entries) if of_key == key]
        assert came == [n for _, n in sorted(due)]


@pytest.mark.slow
@effort(max_examples=examples(60), deadline=None)
@given(
    HISTORY,
    st.lists(st.tuples(st.integers(0, 19), st.booleans(), st.sampled_from(SHAPED)), max_size=4),
    st.integers(0, 1 << 30),
    st.integers(1, 2),
)
def test_settings_that_are_edited_between_two_runs_lose_and_double_nothing_and_hold_for_what_is_handed_out_then(
    history: list[Step], edits: list[tuple[int, bool, dict[str, Any]]], seed: int, shards: int
) -> None:
    story = Story(seed, shards, {})
    service, since, is_ordered = story.service, 0, True
    phases: list[tuple[int, int]] = []  # ticks after the first and up to the second were in order
    for number, step in enumerate(history):
        for at, is_on, shaped in edits:
            if at == number:
                phases += [(since, service.tick)] if is_ordered else []
                since, is_ordered = service.tick, is_on
                service.settings = settings_of(**MANY_RETRIES, **shaped, order="key" if is_on else "none")
                service.routes = service.routes.updated_to(service.settings)
                service.start()
        story.go_on(*step)
    story.end()
    phases += [(since, service.tick)] if is_ordered else []
    for name in ("one", "other"):
        assert Counter(one.position[1] // ENTRY for one in service.came(name)) == story.expected(name)
    for first, last in phases:
        assert violations([one for one in story.came("one") if first < one.tick <= last]) == []


@pytest.mark.slow
@pytest.mark.parametrize("is_handed_out", [False, True])
def test_attempts_that_are_lowered_hold_for_retries_that_wait_and_not_for_what_was_handed_out(
    is_handed_out: bool,
) -> None:
    story = Story(1, 1, {})
    service = story.service
    for later, entries in [(100, [(1, 5_000)])] + [(900, [])] * 6:
        story.go_on(later, entries, ("", 0, 0), 100, False)
    story.go_on(500, [], (RETRY, 0, 3_000), 100, False)
    assert story.expected("one") == {0: 2}
    if is_handed_out:
        story.go_on(2_500, [], ("", 0, 0), 0, False)
    service.settings = settings_of(backoff={"attempts": 0})
    service.routes = service.routes.updated_to(service.settings)
    service.start()
    story.end()
    came = [[one.attempt for one in service.came(name)] for name in ("one", "one-dlq")]
    assert came == ([[None, 1], []] if is_handed_out else [[None], [1]])


@pytest.mark.slow
def test_without_it_the_same_history_has_messages_of_a_key_overtake_each_other() -> None:
    # The other subscription has the same messages, but no order.
    found = 0
    for seed in range(6):
        story = Story(seed, 2, {})
        for n in range(12):
            what = [CANCEL, RESCHEDULE, "pause", "send back", "resume", RETRY][n % 6]
            entries = [(1 + (n + i) % 3, 250 * i) for i in range(4)]
            story.go_on(300, entries, (what, 3 * n, 700), 4, n == 7)
        story.end()
        assert violations(story.came("one")) == []
        found += len(violations(story.came("other")))
    assert found
