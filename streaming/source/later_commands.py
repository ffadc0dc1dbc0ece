"""Finds earlier commands for later subscriptions (`*`), to apply them to a subscription that is added now."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import ANSWER, RESCHEDULE, RESTORE, SINGLE_ACK_KINDS, SKIP, Effect
from tracker.messages import concat, empty_table, where
from tracker.schemas import COMMAND_ROWS, MAX_REQUEST_ID_BYTES, PauseChange
from tracker.subscriptions import ALSO_LATER
from tracker.wire.delaylake_pb2 import Result
from warehouse.delta.tables import Tables
from warehouse.named_queries import NamedQueries
from warehouse.pending import EFFECT
from warehouse.queries.index_rows import LOOKED_UP, in_index_or_not_durable
from warehouse.routes.known_routes import KnownRoutes
from warehouse.routes.membership import Changes

_SQL = NamedQueries(__file__, effect=EFFECT, also_later=ALSO_LATER)

# The command that has the effect again. An applied cancel has met its message, so a skip, which has no time, will do.
_KINDS = {Effect.CANCEL: SKIP, Effect.RESTORE: RESTORE, Effect.MOVE: RESCHEDULE}

# As `outcomes` names them: they are NOT_ALLOWED for a subscription that acknowledges cumulatively.
_NEED_SINGLE_ACKS = pa.array([kind.upper() for kind in SINGLE_ACK_KINDS])


def later_commands(
    tables: Tables, versions: list[int], changed: Changes, routes: KnownRoutes
) -> tuple[pa.Table, list[PauseChange]]:
    """Finds earlier commands for later subscriptions, and addresses them to the subscriptions that are added now.

    A command that was answered for such a subscription before, when the settings had it, is left out.

    Args:
        tables: of the warehouse.
        versions: of the tables LOOKED_UP.
        changed: the changed subscriptions of an offset.
        routes: of that offset.

    Returns:
        (commands, pauses): the commands as COMMAND_ROWS, with an ANSWER for each pause.
    """
    found, pause_changes = [empty_table(COMMAND_ROWS)], []
    for topic, of_topic in changed.items():
        if of_topic["handed_out"] < 0:
            continue  # a new topic, which has had no commands
        names = [s.name for s in routes.routes[topic].subscriptions]
        for name in (name for name, change in of_topic["subscriptions"].items() if change == "ADDED"):
            bits = 1 << names.index(name)
            sql = _SQL("commands_for_later", topic=topic, subscription=name)
            rows = tables.query("outcomes", sql, versions[LOOKED_UP.index("outcomes")])
            is_pause_change = pc.is_in(rows["effect"], pa.array([Effect.HOLD, Effect.RESUME]))
            pauses, rows = rows.filter(is_pause_change), rows.filter(pc.invert(is_pause_change))
            if routes.subscriptions.cumulative.get(topic, 0) & bits:
                rows = rows.filter(pc.invert(pc.is_in(rows["operation"], _NEED_SINGLE_ACKS)))
            if rows.num_rows:
                rows = where(rows, in_index_or_not_durable(tables, versions, rows, of_topic["handed_out"]))
                found.append(_commands(rows, bits))
            if pauses.num_rows and pauses["effect"][-1].as_py() == Effect.HOLD:
                last = pauses.slice(pauses.num_rows - 1)
                request_id = _at_most(f"{last['request_id'][0].as_py()} {name}", MAX_REQUEST_ID_BYTES)
                pause_changes.append(PauseChange(request_id, topic, bits, is_paused=True))
                found.append(_answer(last, name, request_id))
    return concat(found, COMMAND_ROWS), pause_changes


def _commands(rows: pa.Table, bits: int) -> pa.Table:
    kinds = [_KINDS[effect] for effect in rows["effect"].to_pylist()]
    values = {name: rows[name] for name in rows.column_names if name in COMMAND_ROWS.names}
    values |= {
        "kind": pa.array(kinds, pa.string()),
        "subscriptions": pa.repeat(bits, rows.num_rows),
        "deliver_at": pc.fill_null(rows["deliver_at"], 0),
        "body": pa.repeat(0, rows.num_rows),  # it is no repeat
    }
    return _as_commands(values, rows.num_rows)


def _answer(row: pa.Table, name: str, request_id: str) -> pa.Table:
    values = {column: row[column] for column in row.column_names if column in COMMAND_ROWS.names} | {
        "request_id": pa.array([request_id]),
        "kind": pa.array([ANSWER]),
        "subscriptions": pa.array([0]),
        "subscription": pa.array([name]),
        "result": pa.array([int(Result.APPLIED)]),
        "reason": pa.array([""]),
        "deliver_at": pa.array([0]),
        "body": pa.array([0]),
    }
    return _as_commands(values, 1)


def _as_commands(values: dict[str, pa.Array], n: int) -> pa.Table:
    return pa.table(
        [values[f.name].cast(f.type) if f.name in values else pa.nulls(n, f.type) for f in COMMAND_ROWS],
        schema=COMMAND_ROWS,
    )


def _at_most(text: str, n_bytes: int) -> str:
    """Cuts a text so that its UTF-8 has at most so many bytes."""
    return text.encode()[:n_bytes].decode(errors="ignore")
