"""Sends releases in Spark tasks: each message at its time."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from pyspark import TaskContext

from broker.client import PulsarError
from broker.protocol.building import OutgoingMessage
from conf.message_size import max_size_bytes
from conf.settings import Settings, settings_from_json
from streaming.free_memory import give_back_memory
from streaming.release import outgoing
from streaming.release.attempt import Assignment, Attempt, FailedProducer, SendReport
from streaming.release.task import process_clients
from streaming.release.task.connections import Connections
from streaming.release.task.deliveries import delivery_rows, traced_delivery
from streaming.release.task.order_signal import wait_for_signal
from streaming.release.task.planning.plan_release import plan_release
from streaming.release.task.planning.send_plan import Plan, PlannedSend
from streaming.release.task.planning.sending_order import Pending, arriving_before, by_time
from streaming.release.task.producer_line import Line
from streaming.release.task.producers import lines_of
from streaming.release.task.refused import packed_by_release, send_to_rejects_topics
from streaming.release.task.send_on_time import send_on_time
from streaming.release.task.shared_paces import Pace, Paces
from streaming.release.task.traces import are_traced, trace
from tracker.packing import pack
from warehouse.delivery_key import key_of_row
from warehouse.delta.fencing import PauseWatch
from warehouse.delta.tables import Tables

_log = logging.getLogger(__name__)

_GONE = "the settings no longer have the subscription; it may have arrived before"


def send_releases(
    settings_json: str,
    attempt: Attempt,
    assignments: Iterable[Assignment],
    epoch: int | None = None,
    checked_at: float | None = None,
) -> Iterator[SendReport]:
    """Sends all messages of some assignments, by time, and yields a report when each producer has succeeded or failed.

    Args:
        settings_json: the settings as JSON.
        attempt: says which messages to leave out.
        assignments: of one release or several, of any shards.
        epoch: the only epoch of the warehouse in which the task may send; None: it may in any.
        checked_at: when the driver last checked the epoch, seconds since the epoch of the clock; None: now.

    Yields:
        one report; none without assignments.

    Raises:
        FencedError: the process stood still for a while, and another job has taken the warehouse over.
    """
    settings = settings_from_json(settings_json)
    watch = PauseWatch(lambda: _check_epoch(settings, epoch), since=checked_at)
    if _is_repeated_task():
        attempt = replace(attempt, is_first=False)
    partitions_now = functools.cache(functools.partial(_partitions_now, settings))
    plans = [plan_release(settings, assignment, attempt, partitions_now) for assignment in assignments]
    if plans:
        yield _send(settings, attempt, plans, watch)
    plans.clear()
    give_back_memory()


def _is_repeated_task() -> bool:
    """Whether Spark itself repeats this task, because a worker or an executor was lost."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def _partitions_now(settings: Settings, topic: str) -> int | PulsarError:
    """Returns the number of a topic's partitions, 0: it is not partitioned; or the error of the look-up."""
    try:
        return process_clients.brokers(settings).partitions(topic)
    except PulsarError as error:
        return error


def _send(settings: Settings, attempt: Attempt, plans: list[Plan], watch: PauseWatch) -> SendReport:
    pending = by_time(plans)
    connections = Connections(settings, attempt.apart)
    lines = lines_of(settings, attempt, pending, connections)
    if attempt.pace_file:
        _set_paces(_paces(attempt.pace_file), pending)
    refused: dict[int, str] = {}  # why a message can't be sent, by its index in `pending`
    try:
        sent_at = _hand_over(settings, attempt, pending, lines, refused.__setitem__, watch)
    except BaseException:
        for line in lines:
            line.close()
        connections.end(lines, has_failed=True)
        raise
    for line in lines:
        line.close()
    for line in lines:
        line.wait_closed()
    for line in lines:
        line.check_repeated()
    not_found = [one for plan in plans for one in plan.failed]
    connections.end(lines, has_failed=any(not one.is_refused for one in not_found))
    failed = (*not_found, *(_failed(line, connections) for line in lines if line.has_failed))
    has_arrived = ~np.array([line.has_failed for line in lines], np.bool_)[pending.columns.line]
    arrived = np.flatnonzero(has_arrived)
    taken = arrived[~np.isin(arrived, list(refused))] if refused else arrived
    not_taken = [
        (*pending[i], why)
        for i, why in sorted(refused.items())
        if has_arrived[i] and pending.sends[i].subscription is not None
    ]
    dropped = [(send, plan, _GONE) for plan in plans for send in plan.dropped]
    not_taken += dropped
    send_to_rejects_topics(settings, not_taken)
    _trace((*pending[i], sent_at[i]) for i in taken.tolist())
    done = {(plan.tick, *line.key) for line, plan in pending.lines_and_plans(arrived)}
    return SendReport(
        deliveries=pack(delivery_rows(pending, taken, sent_at)),
        ready_at=max((line.opened_at for line in lines), default=0),
        done=tuple(done | {(plan.tick, send.topic, send.producer) for send, plan, _ in dropped}),
        failed=failed,
        skipped=frozenset(recipient for plan in plans for recipient in plan.skipped),
        refused=packed_by_release(not_taken),
    )


def _hand_over(
    settings: Settings,
    attempt: Attempt,
    pending: Pending,
    lines: list[Line],
    on_refused: Callable[[int, str], None],
    watch: PauseWatch,
) -> list[int]:
    """Opens the lines, waits for the order signal, and sends each message at its time.

    Returns:
        when each message was handed over, as `send_on_time` returns it.
    """

    def build(i: int) -> OutgoingMessage | None:
        send, plan = pending[i]
        # First of all: a message that can't be built has not arrived, whatever has arrived after it.
        message = _message(settings, send, plan)
        if send.first_id <= send.line.resume_after:
            # It has arrived before, unless it was not taken. A large one is handed over again, so that whoever did
            # not take it says so again; the broker drops what it has.
            return message if send.is_large and send.first_id <= send.line.remembered else None
        arrived = send.line.arrived_keys
        if arrived or attempt.recorded:
            key = key_of_row(plan.columns, send.row, send.subscription is None)
            if key in arrived or key in attempt.recorded:
                return None  # it has arrived before, under another name, or in an earlier run
        return message

    for line in lines:
        line.open()
    behind = wait_for_signal(attempt.order_signal, watch.check)
    for line in lines:
        if line.recipient in behind:
            line.fail("what comes before has not arrived", is_refused=True)
    wake = lines[0].wake if lines else threading.Event()
    return send_on_time(pending.sends, build, on_refused, wake, watch, arriving_before(pending))


def _failed(line: Line, connections: Connections) -> FailedProducer:
    return FailedProducer(
        topic=line.topic,
        producer=line.key,
        recipient=line.recipient,
        reason=line.error,
        is_refused=line.is_refused,
        foreign_id=line.foreign_id,
        is_partly_sent=line.is_partly_sent,
        arrived_to=line.arrived_to,
        is_behind=line.is_behind,
        is_slow=line.is_slow,
        is_alone=connections.is_alone(line.recipient),
        is_untouched=line.is_untouched,
    )


def _trace(sent: Iterable[tuple[PlannedSend, Plan, int]]) -> None:
    """Makes the spans of sent messages; messages for rejects topics have none.

    Args:
        sent: (message, plan, time in ms since the epoch at which it was sent).
    """
    if are_traced():
        try:
            trace(traced_delivery(*one) for one in sent if one[0].subscription is not None)
        except Exception as error:  # no reason to send the messages again
            _log.warning("no spans of a release: %s", error)


def _set_paces(paces: Paces, pending: Pending) -> None:
    """Sets `pace` of the first message of each batch, where its subscription has a rate."""
    if not any(plan.limits for plan in pending.plans):
        return
    of_name: dict[tuple[str, ...], Pace] = {}
    for send, plan in pending:
        topic = plan.columns["topic"][send.row]
        limit = plan.limits.get((topic, send.subscription))
        # Dead letters go to another topic, at the times that the shaper has given them.
        if limit is not None and not send.is_dead and send.first_id == send.sequence_id:
            key = (plan.columns["key"][send.row] or "") if limit.is_per_key else ""
            name = (topic, str(send.subscription), key)
            if name not in of_name:
                of_name[name] = Pace(paces, limit, *name)
            send.pace = of_name[name]


@functools.lru_cache(maxsize=1)
def _paces(file: str) -> Paces:
    """Returns the rates' buckets; the file stays open in this process, for its next tasks."""
    return Paces(Path(file))


def _check_epoch(settings: Settings, epoch: int | None) -> None:
    tables = Tables(settings.warehouse)
    tables.join(epoch)
    tables.check_epoch()


def _message(settings: Settings, send: PlannedSend, plan: Plan) -> OutgoingMessage:
    if send.row in plan.unsendable and send.subscription is not None:
        raise outgoing.UnsendableError(plan.unsendable[send.row])
    if send.subscription is None:
        max_size = max_size_bytes(settings, plan.columns["topic"][send.row])
        return outgoing.rejected(plan.columns, send.row, send.sequence_id, max_size)
    return outgoing.delivered(
        plan.columns, send.row, send.due, send.sequence_id, send.subscription if send.is_dead else None
    )
