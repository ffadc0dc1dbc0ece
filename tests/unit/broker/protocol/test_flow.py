"""How many messages the broker may send: one consumer, and many that share a budget."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.protocol.flow import FetchBudget, FlowControl
from tests.support.fuzzing.examples import examples


def test_before_the_first_message_few_are_asked_for_and_then_as_many_as_fit() -> None:
    assert FlowControl(FetchBudget(1_000), max_messages=5_000).grant() == 1
    assert FlowControl(FetchBudget(1 << 30), max_messages=5_000).grant() == 16
    flow = FlowControl(FetchBudget(8 << 20), max_messages=5_000)
    assert flow.grant() == 8
    assert flow.grant() == 0
    flow.came(8, 800)
    flow.taken(8, 800)
    assert flow.grant() == 5_000, "100 bytes each: the number is what bounds them"
    flow.came(1, 4_000_000)
    flow.taken(1, 4_000_000)
    assert flow.grant() == 0, "the broker has permits for more than fit already"


def test_a_message_larger_than_the_budget_comes_alone() -> None:
    flow = FlowControl(FetchBudget(1_000), max_messages=100)
    assert flow.grant() == 1
    flow.came(1, 5_000)
    assert flow.grant() == 0
    flow.taken(1, 5_000)
    assert flow.grant() == 1


@given(
    sizes=st.lists(st.tuples(st.sampled_from([1, 7, 400, 1_000]), st.integers(1, 2_000_000)), max_size=400),
    data=st.data(),
)
@settings(max_examples=examples(100), deadline=None)
def test_a_broker_that_sends_a_hundred_entries_for_any_permit_always_gets_more(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """It counts below zero what it has sent beyond its permits, and sends nothing until that is granted, too."""
    flow = FlowControl(FetchBudget(4 << 20), max_messages=20_000)
    permits = flow.grant()
    while sizes:
        assert permits > 0, "nothing waits, and nothing would ever come"
        n = data.draw(st.integers(1, 100))
        burst, sizes = sizes[:n], sizes[n:]
        for size in burst:
            flow.came(*size)
            permits -= size[0]
        for size in burst:
            flow.taken(*size)
            permits += flow.grant()
    assert permits > 0


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 200_000)), max_size=60),
    taken_first=st.booleans(),
)
@settings(max_examples=examples(200), deadline=None)
def test_a_consumer_that_takes_all_is_never_left_without_permits(
    sizes: list[tuple[int, int]], taken_first: bool
) -> None:
    """Whatever the broker sends, as whole batches, beyond its permits, too."""
    flow = FlowControl(FetchBudget(1_000_000), max_messages=1_000)
    permits = flow.grant()
    waiting: list[tuple[int, int]] = []
    for size in sizes:
        assert permits > 0 or waiting
        while permits <= 0:
            flow.taken(*waiting.pop(0))
            permits += flow.grant()
        flow.came(*size)
        permits -= size[0]
        waiting.append(size)
        if taken_first:
            flow.taken(*waiting.pop(0))
            permits += flow.grant()
    while waiting:
        flow.taken(*waiting.pop(0))
        permits += flow.grant()
    assert permits > 0


@dataclass
class Partition:
    """A topic partition with a backlog, its consumer, and the broker's count of its permits."""

    name: int
    budget: FetchBudget
    backlog: list[tuple[int, int]]  # (messages, bytes) of each entry
    permits: int = 0
    waiting: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flow = FlowControl(self.budget, 20_000, self.grant)
        self.grant()

    def grant(self) -> None:
        self.permits += self.flow.grant()

    def send(self) -> bool:
        """The broker sends an entry for each permit that it has; returns whether any."""
        entries, self.backlog = self.backlog[: max(self.permits, 0)], self.backlog[max(self.permits, 0) :]
        for entry in entries:
            self.permits -= entry[0]
            if self.flow.came(*entry):
                self.budget.wake()
        self.waiting += entries
        return bool(entries)

    def take(self) -> None:
        if self.flow.taken(*self.waiting.pop(0)):
            self.budget.wake()
        self.grant()

    @property
    def is_silent(self) -> bool:
        return self.flow.waits_for_turn and not (self.backlog and self.permits > 0)

    @property
    def n_bytes(self) -> int:
        return sum(n_bytes for _, n_bytes in self.waiting)


def drain(partitions: list[Partition], chance: random.Random) -> tuple[int, list[int]]:
    """Takes all backlogs; returns (the most bytes that waited, the partitions in the order of their last entry)."""
    most, ended, n_bytes = 0, [], 0
    while left := [p for p in partitions if p.backlog or p.waiting]:
        is_any = False
        for partition in chance.sample(partitions, len(partitions)):
            n_bytes -= partition.n_bytes
            is_any |= partition.send()
            most = max(most, n_bytes + partition.n_bytes)
            if partition.waiting and chance.random() < 0.7:
                partition.take()
                is_any = True
            n_bytes += partition.n_bytes
            if partition.is_silent:
                partition.flow.pass_turn()
                partition.budget.wake()
                is_any = True
        ended += [p.name for p in left if not (p.backlog or p.waiting)]
        assert is_any or any(p.waiting for p in left), "what is left never comes"
    return most, ended


@pytest.mark.slow
def test_a_thousand_partitions_of_large_messages_stay_within_the_budget() -> None:
    budget = FetchBudget(16 << 20, 4 << 20)
    partitions = [Partition(i, budget, [(1, 1 << 20)] * 3) for i in range(1_000)]
    most, ended = drain(partitions, random.Random(1))
    assert len(ended) == 1_000
    assert most <= 64 << 20, "before the first entry of a partition has come, its size is not known"


def test_small_ones_wait_for_no_large_one() -> None:
    budget = FetchBudget(1 << 20, 4 << 20)
    small = [Partition(i, budget, [(1, 500)] * 50) for i in range(10)]
    large = [Partition(10 + i, budget, [(1, 5 << 20)] * 50) for i in range(10)]
    for partition in [*small, *large]:
        partition.send()
        if partition in small:
            partition.take()
    waiting = next(p for p in large if p.waiting)  # and nobody takes it
    for _ in range(60):
        for partition in small:
            while partition.waiting:
                partition.take()
            partition.send()
    assert not any(p.backlog for p in small)
    assert waiting.waiting
    assert drain([*small, *large], random.Random(1))[1]


def test_large_ones_have_their_turns_one_after_another() -> None:
    budget = FetchBudget(1 << 20, 1 << 10)
    partitions = [Partition(i, budget, [(1, 1 << 20)] * 5) for i in range(4)]
    order = []
    for _ in range(16):
        order += [partition.name for partition in partitions if partition.send()]
        for partition in partitions:
            if partition.waiting:
                partition.take()
    assert sorted(order[:4]) == [0, 1, 2, 3]
    later = order[4:12]
    assert all(later[i] == later[i + 4] for i in range(4)), order


def test_one_to_which_nothing_comes_keeps_nobody_from_a_turn() -> None:
    budget = FetchBudget(1 << 20, 1 << 10)
    silent = [Partition(i, budget, []) for i in range(9)]
    late = Partition(9, budget, [(1, 1 << 20)])
    assert not late.send()
    for partition in silent:
        partition.flow.pass_turn()
        budget.wake()
    assert late.send()
    for partition in silent:
        assert partition.permits == 1, "what comes later comes at once"
        partition.backlog = [(1, 1 << 20)]
        assert partition.send()
    partition = silent[0]
    partition.backlog = [(1, 1 << 20)]
    partition.take()
    assert not partition.send(), "nine others are over the budget"


def test_who_leaves_gives_up_its_turn_and_its_place() -> None:
    budget = FetchBudget(1 << 20, 1 << 10)
    first, second, third = (Partition(i, budget, [(1, 2 << 20)]) for i in range(3))
    assert first.send()
    for partition in (second, third):  # of unknown size, they have turns still
        partition.flow.pass_turn()
    second.permits = third.permits = 0
    for partition in (second, first):
        partition.flow.leave()
        budget.wake()
    assert budget.turns.take(third.flow, 2 << 20)


@given(
    backlogs=st.lists(
        st.lists(
            st.tuples(st.sampled_from([1, 1, 7, 1_000]), st.sampled_from([10, 3_000, 200_000, 1 << 20, 5 << 20])),
            max_size=8,
        ),
        min_size=1,
        max_size=15,
    ),
    max_bytes=st.sampled_from([1, 1_000, 1 << 20, 16 << 20]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(150), deadline=None)
def test_whatever_waits_comes_in_the_end(backlogs: list[list[tuple[int, int]]], max_bytes: int, seed: int) -> None:
    budget = FetchBudget(max_bytes, 4 << 20)
    partitions = [Partition(i, budget, list(backlog)) for i, backlog in enumerate(backlogs)]
    drain(partitions, random.Random(seed))
    for partition in partitions:
        partition.flow.leave()
    budget.wake()
    assert not budget.turns._taken
    assert not budget.turns._waiting
    assert budget.turns._bytes == 0
