"""Makes the producers of a task: a line for each, with what is known of what has arrived under its name."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pulsar

from broker import dead_letter_subscription
from conf.settings import Settings
from streaming.release.attempt import Attempt, Generation
from streaming.release.naming import PRODUCER_OPTIONS
from streaming.release.sequence_ids import last_sequence_id
from streaming.release.task import process_clients
from streaming.release.task.planning.destinations import target_of
from streaming.release.task.planning.send_plan import Plan, PlannedSend
from streaming.release.task.producer_line import Line
from warehouse.delivery_key import Key, key_of
from warehouse.message_schemas import producer_with_schema

_MARGIN_MILLIS = 60_000  # by which the clocks of machines may differ


def lines_of(settings: Settings, attempt: Attempt, pending: list[tuple[PlannedSend, Plan]]) -> list[Line]:
    """Makes a line for each topic and producer's name in the plan, and sets it in the messages; opens none."""
    client = process_clients.pulsar_client(settings)
    wake = threading.Event()
    lines: dict[tuple[str, str], Line] = {}
    since: dict[tuple[str, str], int] = {}  # ms since the epoch: none of a line's messages is sent before
    for send, plan in pending:
        key = (send.topic, send.producer)
        if key not in lines:
            generation = attempt.generations.get(key, Generation(0, 0))
            lines[key] = Line(
                *key,
                functools.partial(_producer, settings, client, send, plan, generation.name(send.producer)),
                attempt.patience_seconds,
                is_first_attempt=attempt.is_first,
                wake=wake,
                target=target_of(plan.columns["topic"][send.row], send.subscription, send.is_dead),
                before=attempt.arrived_to.get(key, -1),
            )
            since[key] = send.at - _MARGIN_MILLIS
        line = send.line = lines[key]
        if line.find is None and key in attempt.generations and plan.tick <= attempt.generations[key].tick:
            # It may have been sent under an earlier name. The topic says what has arrived; what was noted may not have:
            # the broker may have taken it for a repetition of somebody else's.
            line.find, line.before = functools.partial(_arrived, client, *key, since[key]), -1
        line.last_id = send.first_id
        line.ids.append(send.sequence_id)
        line.most_id = last_sequence_id(max(plan.tick, attempt.sent_to))
    of_topic: dict[str, list[Line]] = {}
    for line in lines.values():
        line.others = of_topic.setdefault(line.topic, [])
        line.others.append(line)
    return list(lines.values())


def _producer(settings: Settings, client: pulsar.Client, send: PlannedSend, plan: Plan, name: str) -> Any:
    options = {"producer_name": name, "batching_enabled": send.is_batched, **PRODUCER_OPTIONS}
    if send.is_dead:
        dead_letter_subscription.ensure_subscription(client, send.topic)  # each time: the topic may have been made anew
    version = plan.columns["schema_version"][send.row] if send.subscription is not None else None
    if version is None:
        return client.create_producer(send.topic, **options)
    schemas = process_clients.destination_schemas(settings)
    info = schemas.info(client, send.topic, plan.columns["topic"][send.row], version)
    return producer_with_schema(client, send.topic, info, **options)


def _arrived(client: pulsar.Client, topic: str, producer: str, since: int) -> frozenset[Key]:
    """Reads which messages a topic has under a producer's names since a time, ms since the epoch.

    Returns:
        their keys.
    """
    found = set()
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    try:
        reader.seek(since)
        while reader.has_message_available():
            message = reader.read_next(10_000)
            try:
                name, properties = message.producer_name(), message.properties()
            except UnicodeDecodeError:
                continue  # somebody else's: the job writes text only
            if name == producer or name.rpartition("-")[0] == producer:
                found.add(key_of(properties))
    finally:
        reader.close()
    return frozenset(found)
