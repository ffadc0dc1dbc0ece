"""Orders the messages of several plans for their producers."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, overload

import numpy as np

from streaming.release.task.planning.groups import groups_of
from streaming.release.task.planning.send_plan import OrderKey, Plan, PlannedLine, PlannedSend, Sends, planned_sends
from tracker.in_flight import IN_ORDER
from tracker.messages import Int64Array


class Pending(Sequence[tuple[PlannedSend, Plan]]):
    """The messages of all plans of a task, in the order in which producers get them.

    As a sequence it has each message with its plan.

    Attributes:
        plans: the plans.
        lines: the lines of all plans, in the order of their first message.
        columns: the messages; `line` is an index in `lines`.
        plan: int64, (messages,): the index of each message's plan.
        sends: the same messages as objects.
    """

    def __init__(self, plans: list[Plan], lines: Sequence[PlannedLine], columns: Sends, plan: Int64Array) -> None:
        self.plans = plans
        self.plan = plan
        numbers, first = groups_of(columns.line)
        self.lines = [lines[i] for i in columns.line[first].tolist()]
        columns.line = numbers
        self.columns = columns
        self.sends = planned_sends(self.lines, columns)
        for i in np.flatnonzero(np.array([one.order_keys is not None for one in plans], np.bool_)[plan]).tolist():
            send, of = self[i]
            send.key = _key_of(of, send.of, send.row)

    def by_line(self) -> list[Int64Array]:
        """Returns the indexes of each line's messages, ascending."""
        order = np.argsort(self.columns.line, kind="stable")
        ends = np.cumsum(np.bincount(self.columns.line, minlength=len(self.lines)))
        return np.split(order, ends[:-1]) if self.lines else []

    def plans_of(self, chosen: Int64Array) -> list[Plan]:
        """Returns the plans of some messages, each once."""
        return [self.plans[i] for i in np.unique(self.plan[chosen]).tolist()]

    def lines_and_plans(self, chosen: Int64Array) -> list[tuple[PlannedLine, Plan]]:
        """Returns line and plan of some messages, each pair once."""
        _, examples = groups_of(self.columns.line[chosen], self.plan[chosen])
        return [(self.lines[self.columns.line[i]], self.plans[self.plan[i]]) for i in chosen[examples].tolist()]

    def payload_bytes(self, chosen: Int64Array) -> int:
        """Returns the bytes of the payloads of some messages together."""
        rows, of_plan = self.columns.row[chosen], self.plan[chosen]
        return sum(int(plan.payload_bytes[rows[of_plan == i]].sum()) for i, plan in enumerate(self.plans))

    def __len__(self) -> int:
        """The number of messages."""
        return len(self.sends)

    @overload
    def __getitem__(self, i: int) -> tuple[PlannedSend, Plan]: ...
    @overload
    def __getitem__(self, i: slice) -> list[tuple[PlannedSend, Plan]]: ...
    def __getitem__(self, i: int | slice) -> tuple[PlannedSend, Plan] | list[tuple[PlannedSend, Plan]]:
        """Returns a message with its plan."""
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(len(self)))]
        return self.sends[i], self.plans[self.plan[i]]

    def __iter__(self) -> Iterator[tuple[PlannedSend, Plan]]:
        """Yields each message with its plan."""
        return zip(self.sends, (self.plans[i] for i in self.plan.tolist()), strict=True)


def by_time(plans: list[Plan]) -> Pending:
    """Returns the messages of all plans in the order in which producers get them.

    Messages are ordered by `at`, and if any was parked, then by `was_at`. Messages of one producer stay in the order
    of their sequence ids, also across ticks; messages of one key stay in the order in which they were dispatched. For
    that, `at` and `was_at` of some messages are set to later times.

    Args:
        plans: at least one.
    """
    plans = sorted(plans, key=lambda plan: (plan.tick, plan.kind))
    lines, sends, of_plan = _joined(plans)
    # Overdue messages are put off to one time: then `was_at` alone does not keep those of a producer in order.
    if plans[0].tick < plans[-1].tick or any(plan.is_put_off for plan in plans):
        _not_before_lower_ids(sends)
    are_in_order = np.array([bool(plan.kind & IN_ORDER) for plan in plans], np.bool_)[of_plan]
    order = np.flatnonzero(~are_in_order)
    if are_in_order.any():
        order = np.concatenate([order, _in_order_of_keys(plans, lines, sends, of_plan)])
    if any(plan.has_held for plan in plans):
        order = order[np.argsort(sends.was_at[order], kind="stable")]
    order = order[np.argsort(sends.at[order], kind="stable")]
    return Pending(plans, lines, sends.take(order), of_plan[order])


def _joined(plans: list[Plan]) -> tuple[list[PlannedLine], Sends, Int64Array]:
    """Returns the lines of all plans, their messages one plan after another, and the index of each message's plan."""
    numbers: dict[tuple[str, str], int] = {}
    lines: list[PlannedLine] = []
    parts = []
    for plan in plans:
        for line in plan.lines:
            if line.key not in numbers:
                numbers[line.key] = len(lines)
                lines.append(line)
        part = plan.sends.take(np.arange(len(plan.sends)))
        part.line = np.array([numbers[line.key] for line in plan.lines], np.int64)[part.line]
        parts.append(part)
    return lines, Sends.concat(parts), np.repeat(np.arange(len(plans)), [len(part) for part in parts])


def _not_before_lower_ids(sends: Sends) -> None:
    """Puts off messages that are due before another message of their producer with a lower sequence id.

    Args:
        sends: those of a line ascending by sequence id; changed.
    """
    by_line = np.argsort(sends.line, kind="stable")
    at, was_at = sends.at[by_line], sends.was_at[by_line]
    is_before_all = (at < 0) | ((at == 0) & (was_at < 0))
    at, was_at = np.where(is_before_all, 0, at), np.where(is_before_all, 0, was_at)
    # Each pair by its place among all of them: the largest so far, line by line.
    order = np.lexsort((was_at, at))
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    base = sends.line[by_line] * len(order)
    largest = order[np.maximum.accumulate(places + base) - base]
    sends.at[by_line], sends.was_at[by_line] = at[largest], was_at[largest]


def _in_order_of_keys(plans: list[Plan], lines: list[PlannedLine], sends: Sends, of_plan: Int64Array) -> Int64Array:
    """Merges the messages of plans in the order of their keys; a message is not sent before an earlier one of its key.

    Args:
        plans: in order, ascending by tick, and within a tick by kind.
        lines: of the messages.
        sends: the messages of all plans; changed.
        of_plan: int64, (messages,): the index of each message's plan.

    Returns:
        the order of the messages of those plans that have to come in order, by index.
    """
    joined: list[int] = []
    numbered = [one for one in enumerate(plans) if one[1].kind & IN_ORDER]
    for _, of_release in groupby(numbered, key=lambda one: (one[1].tick, one[1].kind)):
        of_shards = [(np.flatnonzero(of_plan == number).tolist(), plan) for number, plan in of_release]
        joined += of_shards[0][0] if len(of_shards) == 1 else _merged(of_shards, lines, sends)
    order = np.array(joined, np.int64)
    if not _is_ascending(sends.at[order], sends.was_at[order]):
        _not_before_others_of_key(order, plans, lines, sends, of_plan)
    return order


def _merged(of_shards: list[tuple[list[int], Plan]], lines: list[PlannedLine], sends: Sends) -> Iterator[int]:
    """Merges the messages of a release's shards, given by index, in the order of `tracker.messages.in_order`."""
    row, of = sends.row.tolist(), sends.line.tolist()

    def ranked(chosen: list[int], plan: Plan) -> Iterator[tuple[tuple[int, ...], int]]:
        ranks = _ranks(plan)
        return ((() if lines[of[i]].is_dead else ranks[row[i]], i) for i in chosen)

    return (i for _, i in heapq.merge(*(ranked(*one) for one in of_shards), key=lambda one: one[0]))


def _ranks(plan: Plan) -> list[tuple[int, ...]]:
    """Returns the sort key of each row, the same as in `tracker.messages.in_order`."""
    columns = plan.columns
    due, was_due = columns["deliver_at"], columns["was_due"]
    return list(
        zip(
            due,
            (at if was_at is None else was_at for at, was_at in zip(due, was_due, strict=True)),
            (sequence or 0 for sequence in columns["sequence"]),
            *(columns[name] for name in ("ledger_id", "entry_id", "batch_index")),
            strict=True,
        )
    )


def _is_ascending(at: Int64Array, was_at: Int64Array) -> bool:
    """Whether times are ascending by `at`, then by `was_at`, and none is before 1970."""
    later, same = at[1:] > at[:-1], at[1:] == at[:-1]
    return bool((later | (same & (was_at[1:] >= was_at[:-1]))).all() and (at[:1] > 0).all())


def _not_before_others_of_key(
    order: Int64Array, plans: list[Plan], lines: list[PlannedLine], sends: Sends, of_plan: Int64Array
) -> None:
    """Puts off messages that are due before an earlier message of their key, or of their producer.

    Args:
        order: int64: the indexes of messages, in order.
        plans: to which `of_plan` points.
        lines: of the messages.
        sends: the messages; changed.
        of_plan: int64, (messages,): the index of each message's plan.
    """
    at, was_at, row, of = (column.tolist() for column in (sends.at, sends.was_at, sends.row, sends.line))
    last: dict[Any, tuple[int, int]] = {}
    for i, number in zip(order.tolist(), of_plan[order].tolist(), strict=True):
        line = of[i]
        key = _key_of(plans[number], lines[line], row[i])
        time = max((at[i], was_at[i]), last.get(line, (0, 0)), last.get(key, (0, 0)))
        last[line] = last[key] = at[i], was_at[i] = time
    sends.at[:], sends.was_at[:] = at, was_at


def _key_of(plan: Plan, line: PlannedLine, row: int) -> OrderKey | None:
    if plan.order_keys is None or line.is_dead:
        return None
    return plan.columns["topic"][row], line.subscription, plan.order_keys[row]


def arriving_before(pending: Pending) -> list[int]:
    """Returns for each message the index of the message that has to arrive before it is sent.

    Args:
        pending: all messages, in the order in which producers get them.

    Returns:
        the indexes, -1: no message has to arrive before; an empty list: none of the messages has a key.
    """
    if all(plan.order_keys is None for plan in pending.plans):
        return []
    after = [-1] * len(pending)
    last: dict[OrderKey, int] = {}
    for i, send in enumerate(pending.sends):
        if send.key is not None:
            before = last.get(send.key, -1)
            if before >= 0 and pending.sends[before].line is not send.line:  # messages of one producer arrive in order
                after[i] = before
            last[send.key] = i
    return after if last else []
