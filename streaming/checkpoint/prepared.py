"""The prepared state: what a rebuild makes from the tables for the first batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from streaming.checkpoint.offset import Offset
from streaming.operator_input import InputKind
from tracker.messages import typed
from tracker.rebuilt import LIVE_KEYS, MOVED, NOT_TO_DELIVER, OCCURRENCES_DONE
from tracker.schemas import COMMAND_ROWS, OUTCOME_ROWS
from tracker.sharding import shards_of
from warehouse.durable import sync, write_durably

# Inside the query's folder, to be removed with it, so that no later query takes it for its own.
FOLDER = Path("query/rebuild")


class PreparedState:
    """The offset with which the query begins after a rebuild, and the state of each shard.

    `shards`, `paused` and `inputs` raise FileNotFoundError where nothing was prepared.

    Args:
        checkpoint: the checkpoint's folder.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint / FOLDER

    def write_rows(self, rows: Mapping[str, pa.Table]) -> None:
        """Writes the rows of all shards, and syncs them to the disk.

        Args:
            rows: by kind, a value of `InputKind`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for kind, table in rows.items():
            pq.write_table(table, self._folder / f"{kind}.parquet")
        sync(self._folder.iterdir())

    def complete(self, offset: Offset, metadata: Mapping[str, Any]) -> None:
        """Writes offset and metadata, and syncs them to the disk. Call it last: it makes the prepared state valid.

        Args:
            offset: the offset with which the query begins.
            metadata: the part of `inputs` that is JSON; `sealed` and `unwanted` have a number for each shard.
        """
        write_durably(self._folder / "meta.json", json.dumps({"offset": offset.to_json(), **metadata}))

    @property
    def offset(self) -> Offset | None:
        """The offset with which the query begins; None: nothing was prepared."""
        meta = self._folder / "meta.json"
        return Offset.from_json(json.loads(meta.read_text())["offset"]) if meta.exists() else None

    @property
    def shards(self) -> int:
        """The number of shards for which the state was prepared."""
        return len(json.loads((self._folder / "meta.json").read_text())["sealed"])

    @property
    def paused(self) -> dict[str, int]:
        """The mask of the paused subscriptions, by source topic."""
        paused: dict[str, int] = json.loads((self._folder / "meta.json").read_text())["paused"]
        return paused

    def inputs(self, shards: int) -> list[tuple[dict[str, Any], dict[str, pa.Table]]]:
        """Returns the input of each shard.

        Args:
            shards: the number of shards, as the property `shards` says.

        Returns:
            for each shard (counts, request ids and pauses, as JSON has them; its rows by kind).
        """
        meta = json.loads((self._folder / "meta.json").read_text())
        kinds = {
            InputKind.REBUILT_CANCELLED: NOT_TO_DELIVER,
            InputKind.REBUILT_DELIVERED: NOT_TO_DELIVER,
            InputKind.REBUILT_MOVED: MOVED,
            InputKind.REBUILT_WAITING: COMMAND_ROWS,
            InputKind.REBUILT_KEYS: LIVE_KEYS,
            InputKind.REBUILT_OCCURRENCES: OCCURRENCES_DONE,
            InputKind.REBUILT_OUTCOMES: OUTCOME_ROWS,
        }
        tables = {
            kind: typed(pq.read_table(file), schema) if file.exists() else schema.empty_table()
            for kind, schema in kinds.items()
            for file in [self._folder / f"{kind}.parquet"]  # an earlier version of the program wrote fewer files
        }
        # With schedule keys a message may be in any shard, and only the rows of keys say in which. So each shard gets
        # all rows of the other kinds. Outcomes are to be published once, by any shard.
        is_anywhere = bool(meta["offset"].get("keyed"))
        shard = {
            kind: shards_of(rows, shards)
            for kind, rows in tables.items()
            if kind in (InputKind.REBUILT_KEYS, InputKind.REBUILT_OUTCOMES) or not is_anywhere
        }
        return [
            (
                {**meta, "sealed": meta["sealed"][i], "unwanted": meta["unwanted"][i]},
                {
                    kind: rows.filter(pa.array(shard[kind] == i)) if kind in shard else rows
                    for kind, rows in tables.items()
                },
            )
            for i in range(shards)
        ]
