"""The prepared state: what a rebuild makes from the tables for the first batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streaming.batch_schema import InputKind, Rows
from streaming.checkpoint.checkpoint import REPAIR, Checkpoint, CheckpointError
from streaming.checkpoint.offset import Offset
from tracker.messages import BoolArray, typed
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

# A column of the files of the other kinds: whether a row's message may be in any shard.
_IS_ANYWHERE = "is_anywhere"

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
        self._written: list[Path] = []

    def write_rows(self, rows: Mapping[InputKind, pa.Table], may_come_again: Callable[[pa.Table], BoolArray]) -> None:
        """Writes the rows of all shards, and syncs them to the disk.

        Args:
            rows: by kind.
            may_come_again: tells which rows are of entries that may come again from the source topics, and then bring
                the first schedule keys of their topic: bool, (rows,). It is called with ledger_id and entry_id.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for kind, table in rows.items():
            if kind not in _WITH_KEYS:
                table = table.append_column(_IS_ANYWHERE, pa.array(may_come_again(table)))
            self._written.append(self._folder / f"{kind}.parquet")
            pq.write_table(table, self._written[-1])
        sync(self._folder.iterdir())

    def complete(self, offset: Offset, metadata: Mapping[str, Any]) -> None:
        """Writes offset and metadata, and syncs them to the disk. Call it last: it makes the prepared state valid.

        Args:
            offset: the offset with which the query begins.
            metadata: the part of `inputs` that is JSON; `sealed` and `unwanted` have a number for each shard.

        Raises:
            CheckpointError: somebody has removed rows that were written, which would count as none.
        """
        if not all(file.exists() for file in self._written):
            raise CheckpointError(f"{self._folder} was removed while it was made: run `delaylake rebuild` again")
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
        inputs: list[tuple[dict[str, Any], dict[InputKind, pa.Table]]] = [
            ({**meta, "sealed": sealed, "unwanted": unwanted}, {})
            for sealed, unwanted in zip(meta["sealed"], meta["unwanted"], strict=True)
        ]
        # With schedule keys a message may be in any shard, and only the rows of keys say in which. So each shard gets
        # all rows of the other kinds. Outcomes are to be published once, by any shard.
        has_keys = bool(meta["offset"].get("keyed"))
        for kind in _KINDS:
            rows, is_anywhere = self._rows(kind)
            if has_keys and kind not in _WITH_KEYS:
                is_anywhere[:] = True
            shard = shards_of(rows, shards)
            for number, (_, tables) in enumerate(inputs):
                is_own = (shard == number) | is_anywhere
                tables[kind] = rows if is_own.all() else rows.filter(pa.array(is_own))
        return inputs

    def _rows(self, kind: InputKind) -> tuple[pa.Table, BoolArray]:
        """Returns the rows of a kind, and which of them may be of any shard: bool, (rows,).

        An earlier version of the program wrote fewer files, some under other names, and in none what is of any shard.
        """
        schema = kind.body.schema if isinstance(kind.body, Rows) else pa.schema([])
        for name in (kind.value, _EARLIER_NAMES.get(kind, kind.value)):
            if (file := self._folder / f"{name}.parquet").exists():
                rows = pq.read_table(file)
                is_anywhere = np.zeros(rows.num_rows, np.bool_)
                if _IS_ANYWHERE in rows.column_names:
                    is_anywhere |= np.asarray(rows[_IS_ANYWHERE], np.bool_)
                return typed(rows, schema), is_anywhere
        return schema.empty_table(), np.zeros(0, np.bool_)


def last_routes(checkpoint: Path) -> KnownRoutes | None:
    """Returns the routes of the last batch, else of a rebuild; None: the checkpoint has neither.

    Args:
        checkpoint: the checkpoint's folder.

    Raises:
        CheckpointError: that offset can't be read.
    """
    offset = Checkpoint(checkpoint).newest_offset() or PreparedState(checkpoint).offset
    return None if offset is None else offset.known_routes
