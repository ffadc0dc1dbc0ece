"""How many messages the broker may send: one consumer, and many that share a budget."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.protocol.byte_budget import ByteBudget, Share
from broker.protocol.flow import FlowControl
from tests.support.fuzzing.examples import examples

MIB = 1 << 20
LARGEST = 5 * MIB  # of an entry


def test_before_the_first_message_few_are_asked_for_and_then_as_many_as_fit() -> None:
    assert FlowControl(max_bytes=1_000, max_messages=5_000).grant() == 1
    assert FlowControl(max_bytes=1 << 30, max_messages=5_000).grant() == 16
    flow = FlowControl(max_bytes=8 << 20, max_messages=5_000)
    assert flow.grant() == 8
    assert flow.grant() == 0
    for permits in (8, 24, 72, 216, 648, 1_944):
        for _ in range(permits):
            flow.came(1, 100)
            flow.taken(1, 100)
        granted = flow.grant()
        assert granted == min(3 * permits, 5_000), "a few more each time, as long as messages stay small"
    assert granted == 5_000, "100 bytes each: the number is what bounds them"
    flow.came(1, 4_000_000)
    flow.taken(1, 4_000_000)
    assert flow.grant() == 0, "the broker has permits for more than fit already"


def test_a_message_larger_than_the_budget_comes_alone() -> None:
    flow = FlowControl(max_bytes=1_000, max_messages=100)
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
    flow = FlowControl(max_bytes=4 << 20, max_messages=20_000)
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
    flow = FlowControl(max_bytes=1_000_000, max_messages=1_000)
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


@dataclass(eq=False)
class Partition:
    """A topic partition with a backlog of entries of one size, its receiver, and the broker's count of its permits."""

    budget: ByteBudget
    n_bytes: int  # of an entry
    n_messages: int = 1  # likewise
    max_bytes: int = 4 * MIB  # of its flow control
    backlog: int = 0  # entries that the broker has not sent
    permits: int = 0
    waiting: int = 0  # entries that have come
    handed: int = 0  # entries that were handed over
    kept: int = 0  # entries that no batch has taken
    came: int = 0
    is_unreserved: bool = False  # its topic had no more when it got its permit
    may_ask: bool = False

    def __post_init__(self) -> None:
        self.share = self.budget.join()
        self.share.on_turn = lambda: setattr(self, "may_ask", True)
        self.connect()

    def connect(self) -> None:
        self.flow = FlowControl(self.max_bytes, 20_000, self.share, LARGEST)
        self.permits = 0
        self.ask()

    def ask(self) -> None:
        """Does what a consumer does before it waits for an entry, and when its turn has come."""
        if not self.may_ask and (self.flow.has_permits or self.share.is_waiting):
            return
        self.may_ask = False
        is_at_end = self.flow.wants_turn and not self.backlog
        is_unreserved = is_at_end and not self.share.pooled
        while permits := self.flow.grant(is_at_end):
            self.permits += permits
            self.is_unreserved = is_unreserved
        self.budget.wake()

    def send(self) -> None:
        """The broker sends an entry for each permit, up to a hundred at once, as long as it has any."""
        while self.permits > 0 and self.backlog:
            n = min(self.permits, 100, self.backlog)
            self.backlog -= n
            self.waiting += n
            self.came += n
            for _ in range(n):
                self.permits -= self.n_messages
                self.flow.came(self.n_messages, self.n_bytes)

    def receive(self) -> None:
        if self.waiting:
            self.waiting -= 1
            self.handed += 1
            self.flow.taken(self.n_messages, self.n_bytes)
            self.budget.wake()
            if not self.flow.wants_turn:
                self.may_ask, is_asked = True, self.may_ask
                self.ask()
                self.may_ask = is_asked
        self.ask()

    def keep(self) -> None:
        self.kept, self.handed = self.kept + self.handed, 0
        self.share.note(handed=0, kept=self.kept * self.n_bytes)
        self.budget.wake()

    def commit(self) -> None:
        self.kept = 0
        self.share.note(kept=0)
        self.budget.wake()

    def be_silent(self) -> None:
        """Nothing has come for a while, as of a topic whose last entries are markers."""
        if self.flow.has_reserved and not self.backlog:
            self.flow.unreserve()
            self.budget.wake()
            self.is_unreserved = True

    def lose_consumer(self) -> None:
        self.flow.stop_asking()
        self.flow.end()
        self.backlog += self.waiting + self.handed
        self.came -= self.waiting + self.handed
        self.waiting = self.handed = 0
        self.share.note(handed=0, kept=self.kept * self.n_bytes)
        self.budget.wake()
        self.connect()

    @property
    def held_bytes(self) -> int:
        return (self.waiting + self.handed + self.kept) * self.n_bytes


def drain(partitions: list[Partition], rounds: int = 10_000) -> None:
    """Lets everybody do all they can, in turn, until nothing is left."""
    for _ in range(rounds):
        for partition in partitions:
            partition.ask()
            partition.send()
            while partition.waiting:
                partition.receive()
            partition.keep()
            partition.be_silent()
        for partition in partitions:
            partition.commit()
        if not any(p.backlog or p.waiting or p.handed for p in partitions):
            return
    raise AssertionError("what is left never comes")


SIZES = st.sampled_from([(1, 100), (1, 3_000), (300, 30_000), (1, 200_000), (1, MIB), (1_000, MIB), (1, LARGEST)])


class ManyPartitions(RuleBasedStateMachine):
    """Receivers of any topics, each doing any step at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = 16 * MIB
        self.budget = ByteBudget(self.pool, 8 * MIB, 4 * MIB)
        self.partitions: list[Partition] = []
        self.is_any_hurried = False
        self.was_own = 0  # what was reserved or kept as somebody's own before others came, who need their own, too

    @rule(size=SIZES, backlog=st.integers(0, 50))
    def begin(self, size: tuple[int, int], backlog: int) -> None:
        if len(self.partitions) < 20:
            before = self.budget._pooled
            partition = Partition(self.budget, size[1], size[0], backlog)
            self.was_own += self.budget._pooled - before - partition.share.pooled
            self.partitions.append(partition)

    def some(self, data: Any) -> Partition:
        partition: Partition = data.draw(st.sampled_from(self.partitions))
        return partition

    @precondition(lambda self: self.partitions)
    @rule(data=st.data(), n=st.integers(1, 30))
    def publish(self, data: Any, n: int) -> None:
        self.some(data).backlog += n

    @precondition(lambda self: self.partitions)
    @rule(data=st.data(), step=st.sampled_from(["ask", "send", "receive", "keep", "commit", "be_silent"]))
    def step(self, data: Any, step: str) -> None:
        getattr(self.some(data), step)()

    @rule(chance=st.randoms(use_true_random=False))
    def go_on(self, chance: random.Random) -> None:
        for _ in range(10 * len(self.partitions)):
            partition = chance.choice(self.partitions)
            getattr(partition, chance.choice(["ask", "send", "receive", "receive", "keep"]))()

    @precondition(lambda self: self.partitions)
    @rule(data=st.data())
    def pause(self, data: Any) -> None:
        partition = self.some(data)
        partition.share.give_up_turn()
        partition.may_ask = False
        self.budget.wake()

    @precondition(lambda self: self.partitions)
    @rule(data=st.data())
    def lose_consumer(self, data: Any) -> None:
        self.some(data).lose_consumer()

    @precondition(lambda self: self.partitions)
    @rule(data=st.data())
    def hurry(self, data: Any) -> None:
        """Its entries are awaited: they come, whatever the others hold."""
        partition = self.some(data)
        before, self.is_any_hurried = partition.came, self.is_any_hurried or partition.backlog > 0
        partition.share.hurry(True)
        self.budget.wake()
        for _ in range(3):
            partition.ask()
            partition.send()
            while partition.waiting:
                partition.receive()
        partition.keep()
        partition.share.hurry(False)
        assert partition.came > before or not partition.backlog

    @precondition(lambda self: self.partitions)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        partition = self.some(data)
        self.partitions.remove(partition)
        partition.share.leave()
        self.budget.wake()
        assert not partition.share.reserve(1_000)
        partition.share.note(ahead=1_000, handed=1_000, kept=1_000)
        assert partition.share.held_bytes == partition.share.pooled == 0

    @invariant()
    def all_that_is_held_counts(self) -> None:
        for partition in self.partitions:
            assert partition.share.held_bytes >= partition.held_bytes
            assert partition.permits == partition.flow._open
        assert self.budget._pooled == sum(share.pooled for share in self.budget._shares)
        assert self.budget.held_bytes == sum(partition.share.held_bytes for partition in self.partitions)

    @invariant()
    def all_together_stay_within_the_budget(self) -> None:
        """Its own bytes each, the pool, and what came for permits for which nothing could be reserved."""
        if not self.is_any_hurried:
            unreserved = sum(p.n_bytes for p in self.partitions if p.is_unreserved)
            assert self.budget._pooled <= self.pool + unreserved + self.was_own

    def teardown(self) -> None:
        drain(self.partitions)
        for partition in self.partitions:
            partition.share.leave()
        assert not self.budget._shares
        assert not self.budget._waiting
        assert self.budget._pooled == 0


TestManyPartitions = pytest.mark.slow(ManyPartitions.TestCase)
TestManyPartitions.settings = settings(max_examples=examples(300), stateful_step_count=60, deadline=None)


def test_a_thousand_partitions_of_large_messages_stay_within_the_budget() -> None:
    budget, most = ByteBudget(48 * MIB, 32 * MIB, 4 * MIB), 0
    partitions = [Partition(budget, MIB, backlog=3) for _ in range(1_000)]
    for _ in range(2_000):
        for partition in partitions:
            partition.ask()
            partition.send()
            most = max(most, budget.held_bytes) if partition.waiting else most
            partition.receive()
            partition.keep()
        for partition in partitions:
            if partition.kept:
                partition.commit()
        if not any(p.backlog for p in partitions):
            break
    assert not any(p.backlog for p in partitions)
    assert 40 * MIB < most <= 80 * MIB


def test_quiet_partitions_that_joined_step_by_step_leave_room_for_one_with_large_entries() -> None:
    budget = ByteBudget(48 * MIB, 32 * MIB, 16 * MIB)
    quiet = []
    for n_more in (2, 2, 4):
        joined = [Partition(budget, 1_000, backlog=1_000, max_bytes=16 * MIB) for _ in range(n_more)]
        for partition in joined:
            while partition.backlog or partition.waiting:
                partition.send()
                partition.receive()
                partition.keep()
                partition.commit()
        quiet += joined
    busy = Partition(budget, LARGEST, backlog=20)
    assert busy.share.is_waiting, "the first have reserved as their own what is pooled since"
    drain([*quiet, busy])
    for partition in quiet:
        assert partition.flow.has_permits
        assert not partition.flow.has_reserved


def test_small_entries_within_its_own_bytes_are_nothing_to_ask_the_broker_about() -> None:
    small = Partition(ByteBudget(48 * MIB, 32 * MIB, 16 * MIB), 1_000, backlog=1)
    small.send()
    small.receive()
    small.keep()
    assert small.share.ahead > 0
    assert not small.flow.has_reserved


def test_a_partition_gets_one_large_entry_without_a_turn_and_no_second_one_while_it_has_that() -> None:
    budget = ByteBudget(4 * MIB, 64 << 10, 32 << 10)
    other, partition = budget.join(), Partition(budget, MIB)
    partition.flow.came(0, MIB)
    partition.flow.taken(0, MIB)
    partition.share.note(handed=0)
    assert other.reserve(3 * MIB)
    for _ in range(6):
        partition.backlog += 1
        partition.send()
        partition.receive()
        partition.keep()
    assert (partition.came, partition.kept, partition.backlog) == (1, 1, 5)
    assert partition.share.is_waiting
    partition.commit()
    other.leave()
    drain([partition])
    assert partition.came == 6


def test_what_a_turn_has_left_over_is_the_next_ones() -> None:
    budget = ByteBudget(4 * MIB, 2, 1)
    first, second, third = (budget.join() for _ in range(3))
    served: list[Share] = []
    for share in (second, third):
        share.on_turn = lambda share=share: served.append(share)  # type: ignore[misc]
    assert first.reserve(3 * MIB)
    assert not second.reserve(3 * MIB)
    assert not third.reserve(2 * MIB)
    first.leave()
    budget.wake()
    assert served == [second]
    assert second.reserve(MIB)
    budget.wake()
    assert served == [second, third]


def test_turns_of_equals_come_in_the_order_in_which_they_were_waited_for() -> None:
    budget = ByteBudget(40 * MIB, 8_000, 1_000)
    shares = [budget.join() for _ in range(5)]
    served: list[Share] = []
    for share in shares:
        share.on_turn = lambda share=share: served.append(share)  # type: ignore[misc]
    assert shares[0].reserve(30 * MIB)
    for share in shares[1:4]:
        assert not share.reserve(20 * MIB)
    assert shares[4].reserve(1_000), "its own"
    shares[0].note(ahead=11 * MIB)
    budget.wake()
    assert served == []
    shares[0].note(ahead=0)
    budget.wake()
    assert served == shares[1:2]
    shares[3].hurry(True)
    budget.wake()
    assert served == [shares[1], shares[3]]
    shares[1].leave()
    budget.wake()
    assert served == [shares[1], shares[3]]
    shares[3].leave()
    budget.wake()
    assert served == [shares[1], shares[3], shares[2]]


def test_small_entries_wait_for_none_of_a_thousand_large_ones() -> None:
    budget = ByteBudget(4 * MIB, 32 * MIB, 4 * MIB)
    large, small = [budget.join() for _ in range(1_000)], budget.join()
    for share in large:
        share.reserve(MIB)
    assert sum(share.ahead > 0 for share in large) == 3, "a quarter is not for large ones"
    for kept in range(0, MIB - budget.share_bytes, 50_000):
        small.note(kept=kept)
        assert small.reserve(budget.share_bytes)
    small.note(kept=2 * MIB)
    assert not small.reserve(budget.share_bytes), "it has that quarter now, and waits as others do"
    small.note(kept=0)
    assert small.turn


def test_small_entries_go_on_within_what_is_their_own_while_others_have_the_pool() -> None:
    budget = ByteBudget(MIB, 64 << 10, 32 << 10)
    large, small = budget.join(), Partition(budget, 500, backlog=1_000)
    for step in range(20):
        small.send()
        while small.waiting:
            small.receive()
        small.keep()
        if step == 10:
            small.commit()
            assert large.reserve(5 * MIB), "larger than the pool, and alone in it"
    assert small.share.is_waiting
    assert (32 << 10) - 500 < small.share.kept + small.share.handed <= 32 << 10


def test_what_is_larger_than_the_pool_comes_when_nobody_else_has_anything_of_it() -> None:
    budget = ByteBudget(MIB, 1_000, 1_000)
    first, large = budget.join(), budget.join()
    assert first.reserve(500_000)
    assert not large.reserve(5 * MIB)
    first.note(ahead=300_000)
    assert not large.turn
    first.note(ahead=500)
    assert large.reserve(5 * MIB)


def test_who_waits_no_more_holds_up_nobody() -> None:
    budget = ByteBudget(MIB, 1_000, 1_000)
    first, second, third = (budget.join() for _ in range(3))
    assert first.reserve(MIB)
    assert not second.reserve(MIB)
    assert not third.reserve(MIB)
    first.leave()
    second.give_up_turn()
    assert third.turn == MIB
    third.leave()
    assert second.reserve(MIB)
