"""The prepared state: what a rebuild makes from the tables for the first batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from streaming.batch_schema import InputKind, Rows
from streaming.checkpoint.checkpoint import REPAIR, Checkpoint, CheckpointError
from streaming.checkpoint.offset import Offset
from tracker.messages import typed
from tracker.rebuilt import Rebuilt
from tracker.sharding import shards_of
from warehouse.durable import sync, write_durably
from warehouse.routes.known_routes import KnownRoutes

# Inside the query's folder, to be removed with it, so that no later query takes it for its own.
FOLDER = Path("query/rebuild")

# The kinds of rows in it, a file each.
_KINDS = [kind for kind in InputKind if kind.taker is Rebuilt] + [InputKind.REBUILT_OUTCOMES]

# Those of which each row says in which shard its message is, or that only one shard may have.
_WITH_KEYS = (InputKind.REBUILT_KEYS, InputKind.REBUILT_ENDS, InputKind.REBUILT_OUTCOMES)

# Names of files that an earlier version of the program wrote.
_EARLIER_NAMES = {InputKind.REBUILT_CANCELLED: "rebuilt_taken"}


class PreparedState:
    """The offset with which the query begins after a rebuild, and the state of each shard.

    `shards`, `paused` and `inputs` raise FileNotFoundError where nothing was prepared.

    Args:
        checkpoint: the checkpoint's folder.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint / FOLDER

    def write_rows(self, rows: Mapping[InputKind, pa.Table]) -> None:
        """Writes the rows of all shards, and syncs them to the disk.

        Args:
            rows: by kind.
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
    def is_there(self) -> bool:
        """Whether anything was prepared."""
        return (self._folder / "meta.json").exists()

    @property
    def offset(self) -> Offset | None:
        """The offset with which the query begins; None: nothing was prepared.

        Raises:
            CheckpointError: it can't be read.
        """
        if not self.is_there:
            return None
        try:
            return Offset.from_json(json.loads((self._folder / "meta.json").read_text())["offset"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the prepared state in {self._folder} is damaged ({error}): {REPAIR}") from None

    @property
    def shards(self) -> int:
        """The number of shards for which the state was prepared."""
        return len(json.loads((self._folder / "meta.json").read_text())["sealed"])

    @property
    def paused(self) -> dict[str, int]:
        """The mask of the paused subscriptions, by source topic."""
        paused: dict[str, int] = json.loads((self._folder / "meta.json").read_text())["paused"]
        return paused

    def inputs(self, shards: int) -> list[tuple[dict[str, Any], dict[InputKind, pa.Table]]]:
        """Returns the input of each shard.

        Args:
            shards: the number of shards, as the property `shards` says.

        Returns:
            for each shard (counts, request ids and pauses, as JSON has them; its rows by kind).
        """
        meta = json.loads((self._folder / "meta.json").read_text())
        tables = {kind: self._rows(kind) for kind in _KINDS}
        # With schedule keys a message may be in any shard, and only the rows of keys say in which. So each shard gets
        # all rows of the other kinds. Outcomes are to be published once, by any shard.
        is_anywhere = bool(meta["offset"].get("keyed"))
        shard = {
            kind: shards_of(rows, shards) for kind, rows in tables.items() if kind in _WITH_KEYS or not is_anywhere
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

    def _rows(self, kind: InputKind) -> pa.Table:
        """Returns the rows of a kind; an earlier version of the program wrote fewer files, some under other names."""
        schema = kind.body.schema if isinstance(kind.body, Rows) else pa.schema([])
        for name in (kind.value, _EARLIER_NAMES.get(kind, kind.value)):
            if (file := self._folder / f"{name}.parquet").exists():
                return typed(pq.read_table(file), schema)
        return schema.empty_table()


def last_routes(checkpoint: Path) -> KnownRoutes | None:
    """Returns the routes of the last batch, else of a rebuild; None: the checkpoint has neither.

    Args:
        checkpoint: the checkpoint's folder.

    Raises:
        CheckpointError: that offset can't be read.
    """
    offset = Checkpoint(checkpoint).newest_offset() or PreparedState(checkpoint).offset
    return None if offset is None else offset.known_routes
