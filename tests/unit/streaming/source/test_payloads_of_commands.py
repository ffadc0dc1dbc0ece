"""How much of the payloads of messages that commands move passes through Spark."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from conf.settings import Settings
from streaming.batch_schema import InputKind, input_rows
from streaming.checkpoint.payload_files import ASIDE_BYTES_OF_MANY, PayloadFiles
from streaming.source import reader as reader_module
from streaming.source.reader import CommandsPart, SourceReader
from tests.support.tracker.messages import TOPIC, messages
from tracker.commands.decode import Limits
from tracker.entry_log import entries_of
from tracker.messages import MESSAGES, concat
from tracker.packing import pack, unpack
from tracker.wire.delaylake_pb2 import ControlCommand, RescheduleMessages, SkipEntry
from warehouse.delta.tables import Tables
from warehouse.queries import index_rows
from warehouse.queries.index_rows import to_index
from warehouse.routes.known_routes import KnownRoutes

pytestmark = pytest.mark.slow

N, LIMIT = 200, 500_000


@pytest.mark.parametrize("n_bytes", [20_000, 2_000])
def test_many_are_references_however_small_each_is_and_few_are_as_they_were_and_a_replay_has_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_bytes: int
) -> None:
    for module in (reader_module, index_rows):
        monkeypatch.setattr(module, "PART_BYTES", LIMIT)
    routes: Any = [{"source": TOPIC, "subscriptions": [{"name": "a"}]}]
    settings = Settings(warehouse=f"file:{tmp_path}/w", checkpoint=f"file:{tmp_path}/c", routes=routes)
    tables = Tables(settings.warehouse)
    tables.create()
    payloads = {n: os.urandom(n_bytes) if n % 10 else b"small" for n in range(N)}
    rows = concat(messages([(1, n, 9_000 + n)], payload=payload) for n, payload in payloads.items())
    tables.append("delayed_index", to_index(rows, 1), {})
    tables.append("entries", entries_of(rows), {})
    named = [SkipEntry(ledger_id=1, entry_id=n) for n in range(N)]
    moved = ControlCommand(
        request_id="r",
        topic=TOPIC,
        subscriptions=["a"],
        reschedule=RescheduleMessages(entries=named, deliver_at=50_000),
    )
    control = messages([(9, 0, 0)], payload=moved.SerializeToString())
    versions = [tables.version(name) for name in index_rows.LOOKED_UP]
    known = KnownRoutes({}).updated_to(settings).to_json()
    part = CommandsPart(pack(control), versions, known, {}, [], [], Limits(10**12, {}))

    def read() -> list[tuple[str, bytes]]:
        reader = SourceReader({"settings": settings.model_dump_json(), "shard_keys": json.dumps([1]), "epoch": "0"})
        batches = pa.Table.from_batches(reader.read(part)).to_pylist()
        return [(one["kind"], one["body"]) for one in batches]

    files = PayloadFiles.of(settings)
    first = read()
    found = concat(unpack(body) for kind, body in first if kind == InputKind.PAYLOAD_ROWS)
    back = files.bring_back(found)
    assert dict(zip(back["entry_id"].to_pylist(), back["payload"].to_pylist(), strict=True)) == payloads
    are_many = N * n_bytes > 2 * LIMIT
    aside = [ref is not None for ref in found["payload_at"].to_pylist()]
    assert sum(aside) == (N - N // 10 if are_many else 0)
    if are_many:
        assert sum(len(body) for _, body in first) < N * ASIDE_BYTES_OF_MANY
    names = {file.name for file in (tmp_path / "c/query/payloads").glob("*")}
    assert len(names) == (8 if are_many else 0)
    assert read() == first
    assert {file.name for file in (tmp_path / "c/query/payloads").glob("*")} == names
    assert input_rows(InputKind.PAYLOAD_ROWS, MESSAGES.empty_table(), [1]) == []
