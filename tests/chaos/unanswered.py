"""Why a command was not answered: where it is, and what the job, its tables and the outcome topic have of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pulsar

from broker.pulsar_admin.admin_rest import AdminClient
from streaming.checkpoint.checkpoint import Checkpoint
from tests.support.service.harness import Job
from tracker.wire.delaylake_pb2 import ControlCommand, ControlOutcome, Result


def why_unanswered(request_ids: set[str], job: Job, client: pulsar.Client, admin: AdminClient) -> dict[str, Any]:
    """Returns by request id, and once of the job, what there is to know; {} where all is answered."""
    if not request_ids:
        return {}
    control, settings = job.settings.control, job.settings
    found: dict[str, Any] = {request_id: defaultdict(list) for request_id in sorted(request_ids)}
    for message in stored_messages(client, control.topic):
        if (request_id := ControlCommand.FromString(message.data()).request_id) in request_ids:
            found[request_id]["sent"].append(f"{message.topic_name()} {message.message_id()}")
    for message in stored_messages(client, control.outcome_topic):
        outcome = ControlOutcome.FromString(message.data())
        if outcome.request_id in request_ids:
            told = f"{message.message_id()} {outcome.subscription} {Result.Name(outcome.result)} {outcome.reason}"
            found[outcome.request_id]["told"].append(told)
    ids = ", ".join(f"'{request_id}'" for request_id in request_ids)
    for row in job.rows("outcomes", f"SELECT * FROM {{table}} WHERE request_id IN ({ids}) ORDER BY batch_id"):
        found[row["request_id"]]["rows"].append({name: value for name, value in row.items() if value is not None})
    offset = Checkpoint(job.folder / "checkpoint").newest_offset()
    stats = {name: admin.internal_stats(name) for name in client.get_topic_partitions(control.topic)}
    found["job"] = {
        "acknowledged": {name: s and s.acknowledged.get(settings.pulsar.subscription) for name, s in stats.items()},
        "read": offset and {name: offset.positions.get(name) for name in stats},
        "tick": offset and offset.tick,
        "ingested_through": offset and offset.ingested_through,
        "barriers": offset and offset.barriers,
    }
    return found


def stored_messages(client: pulsar.Client, topic: str) -> Iterator[pulsar.Message]:
    """Yields what a topic has, from its beginning."""
    for partition in client.get_topic_partitions(topic):
        reader = client.create_reader(partition, pulsar.MessageId.earliest)
        while reader.has_message_available():
            yield reader.read_next(30_000)
        reader.close()
