"""Orders the messages of several plans for their producers."""

from __future__ import annotations

import heapq
from itertools import groupby
from typing import Any

from streaming.release.task.planning.send_plan import OrderKey, Plan, PlannedSend
from tracker.in_flight import IN_ORDER


def by_time(plans: list[Plan]) -> list[tuple[PlannedSend, Plan]]:
    """Returns the messages of all plans, each with its plan, in the order in which producers get them.

    Messages are ordered by `at`, and if any was held back, then by `was_at`. Messages of one producer stay in the order
    of their sequence ids, also across ticks; messages of one key stay in the order in which they were handed out. For
    that, `at` and `was_at` of some messages are set to later times.
    """
    plans = sorted(plans, key=lambda plan: (plan.tick, plan.kind))
    if plans and plans[0].tick < plans[-1].tick:
        _not_before_earlier_ticks(plans)
    pending = [(send, plan) for plan in plans if not plan.kind & IN_ORDER for send in plan.sends]
    pending += _in_order_of_keys([plan for plan in plans if plan.kind & IN_ORDER])
    if any(plan.has_held for plan in plans):
        pending.sort(key=lambda p: p[0].was_at)
    pending.sort(key=lambda p: p[0].at)
    return pending


def _in_order_of_keys(plans: list[Plan]) -> list[tuple[PlannedSend, Plan]]:
    """Merges the messages of plans in the order of their keys; a message is not sent before an earlier one of its key.

    Args:
        plans: in order, ascending by tick, and within a tick by kind.
    """
    joined: list[tuple[PlannedSend, Plan]] = []
    for _, of_release in groupby(plans, key=lambda plan: (plan.tick, plan.kind)):
        of_shards = [[(send, plan) for send in plan.sends] for plan in of_release]
        joined += heapq.merge(*of_shards, key=lambda one: one[0].rank)
    last: dict[Any, tuple[int, int]] = {}
    for send, _ in joined:
        line = (send.topic, send.producer)
        time = max((send.at, send.was_at), last.get(line, (0, 0)), last.get(send.key, (0, 0)))
        last[line] = last[send.key] = send.at, send.was_at = time
    return joined


def _not_before_earlier_ticks(plans: list[Plan]) -> None:
    """Puts off messages that are due before another message of their producer with a lower sequence id.

    Args:
        plans: ascending by tick; their messages are changed.
    """
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for plan in plans:
        for send in plan.sends:
            key = (send.topic, send.producer)
            last[key] = send.at, send.was_at = max((send.at, send.was_at), last.get(key, (0, 0)))


def arriving_before(pending: list[tuple[PlannedSend, Plan]]) -> list[int]:
    """Returns for each message the index of the message that has to arrive before it is sent.

    Args:
        pending: all messages, in the order in which producers get them.

    Returns:
        the indexes, -1: no message has to arrive before; an empty list: none of the messages has a key.
    """
    after = [-1] * len(pending)
    last: dict[OrderKey, int] = {}
    for i, (send, _) in enumerate(pending):
        if send.key is not None:
            before = last.get(send.key, -1)
            if before >= 0 and pending[before][0].line is not send.line:  # messages of one producer arrive in order
                after[i] = before
            last[send.key] = i
    return after if last else []


def rank_of(columns: dict[str, list[Any]], row: int, was_at: int) -> tuple[int, ...]:
    """Returns a row's sort key, the same as in `tracker.messages.in_order`."""
    position = (columns[name][row] for name in ("ledger_id", "entry_id", "batch_index"))
    return columns["deliver_at"][row], was_at, columns["sequence"][row] or 0, *position
