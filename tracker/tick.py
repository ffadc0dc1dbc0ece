"""The input of a shard for a tick, its effects, and the tick in progress."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from tracker.commands.repeats import FirstAnswers, no_answers
from tracker.entry_log import EMPTY_ENTRIES, ENTRY_LOG_ROWS
from tracker.expiry import Expiring
from tracker.giving_up import GivenUp, GivingUp
from tracker.in_flight import Release
from tracker.keys.live_keys import FindKeyed, none_sealed
from tracker.message_state.parking import Rounds
from tracker.messages import MESSAGES, empty_table
from tracker.rebuilt import Rebuilt
from tracker.requests import FirstOfTick
from tracker.schemas import CANCEL_ROWS, COMMAND_ROWS, KNOWN, OUTCOME_ROWS, PauseChange
from tracker.shaping.shaper import Places


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One step of the job's clock, the same for all shards, and the same when it is replayed.

    Times are ms since the epoch. At the tick that ends a seal epoch, the mutable bucket is sealed and the next segment
    of sealed buckets is loaded. A seal epoch is durable when all messages that came in up to its end are in the delayed
    index or delivered; only then its entries are written to the table `entries` and acknowledged.
    """

    tick: int  # the tick's number, from 1
    cutoff: int  # time: messages due then or before are released
    seal_epoch: int  # how many seal epochs have ended by this tick (included)
    load_horizon: int  # time: all messages due before it are in state
    near_until: int  # time: new messages due before it go to a time slot, later ones to the mutable bucket
    run_id: str  # the run of the query that made the tick
    confirmed: int  # a tick's number: its and earlier releases have arrived and are recorded, or are open
    durable_through: int  # a seal epoch's number: it and all earlier ones are durable
    now: int = 0  # time: the job's clock
    ingested_through: int = 0  # a tick's number: all messages published before its and earlier commands have come in
    sending: str = "{}"  # JSON: how this tick's releases are sent, also when they are dispatched again
    # Unwritable destinations, by source topic and subscription ("" is the topic for rejects). `open`: the releases
    # [tick, kind] that have not arrived there. `recalled`: those of which nothing was sent there, and which are parked
    # from this tick on. `rejects`: the reason why messages that come due for the destination
    # are rejected; without it they are parked.
    unwritable: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Bytes that a shard seals at the latest, and the bytes of large rows that it dispatches at most on short notice,
    # and again at most of what is planned; 0: any number.
    max_bytes: int = 0
    # Instead, the bytes of large rows with payloads in files that it dispatches; 0: they count as the others.
    max_file_bytes: int = 0
    large: Mapping[str, Any] = field(default_factory=dict)  # as `LargeRows.to_json`: which large rows are in state
    # Resumed subscriptions and slow destinations that get some of the messages that are parked for them, in this tick:
    # by source topic and subscription the most; for a slow one the most that a shard adds to `TickInput.drained`.
    drains: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    places: Places = field(default_factory=dict)  # for rows that waited for this tick, because shaping had no place
    # Source topics whose rejects are sent again after this tick: those of this tick go to the table alone, too.
    parked_rejects: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class TickInput:
    """The input of a shard for one tick. Each table has the columns of the schema that its default has."""

    # New messages in any order. Entries are whole, except that other shards may have messages with a schedule key.
    messages: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    # New messages that other shards have, because of their schedule keys, of entries whose home is this shard.
    elsewhere: pa.Table = field(default_factory=partial(empty_table, ENTRY_LOG_ROWS))
    # Sealed rows due from the last tick's load horizon (included) to this tick's (excluded).
    segment: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    # This shard's commands, in the control topic's order.
    commands: pa.Table = field(default_factory=partial(empty_table, COMMAND_ROWS))
    # Commands that wait in the homes of their entries, and from this tick on in this shard, too: their topic has the
    # first message with a schedule key.
    handed_over: pa.Table = field(default_factory=partial(empty_table, COMMAND_ROWS))
    # By request id, for the commands of all shards: the hash of the body of the first command that has the id.
    request_ids: Mapping[str, int] = field(default_factory=dict)
    # The first of the new messages of all shards under each request id.
    message_requests: FirstOfTick = field(default_factory=dict)
    known_messages: pa.Table = field(default_factory=partial(empty_table, KNOWN))  # durable ones that the commands name
    # Sealed rows of messages to reschedule, restore, retry, or move to their next occurrence.
    payload_rows: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    pause_changes: Sequence[PauseChange] = ()  # pauses and resumes of all shards
    rebuilt: Rebuilt | None = None  # only in the first tick after a rebuild
    # Rejected messages of the control topic, with a reason.
    rejected_commands: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    first_answers: FirstAnswers = no_answers  # reads the version of the tables that `known_messages` was read from
    find_keyed: FindKeyed = none_sealed  # reads the version of the delayed index that `segment` was read from
    # Messages rejected in earlier ticks that have not been sent to the topic for rejects, because it was unwritable:
    # as many as are sent in this tick.
    rejected: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    # Topics with a route again, or with a new subscription, or whose destinations can be written again, or whose
    # waiting commands are handed over.
    reinstated: Collection[str] = ()
    # The first sealed rows that are parked for the subscriptions in `rounds`, which are those in `Tick.drains`, and
    # those that are resumed by this tick, or from this tick on not parked for another reason.
    drained: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    rounds: Rounds = field(default_factory=dict)
    # Where the tick has failed without these: rows that are rejected instead of being loaded, and the positions (ledger
    # id, entry id, batch index) of those that are rejected instead of being dispatched.
    failed: pa.Table = field(default_factory=partial(empty_table, MESSAGES))
    fails: frozenset[tuple[int, int, int]] = frozenset()
    # Why, for both, by position: one line, a sentence without its subject.
    why_failed: Mapping[tuple[int, int, int], str] = field(default_factory=dict)


@dataclass
class Effects:
    """The output of a shard for one tick: the releases to send, and the rows to write to the tables."""

    releases: list[Release] = field(default_factory=list)  # to send
    bucket: pa.Table = field(default_factory=partial(empty_table, MESSAGES))  # the sealed bucket, for the delayed index
    # CANCEL, RESTORE and MOVE rows sealed with it.
    cancels: pa.Table = field(default_factory=partial(empty_table, CANCEL_ROWS))
    entries: pa.Table = field(default_factory=lambda: EMPTY_ENTRIES)  # entries that are durable now, a row each
    rejects: pa.Table = field(default_factory=partial(empty_table, MESSAGES))  # rejected messages, with a reason
    outcomes: pa.Table = field(default_factory=partial(empty_table, OUTCOME_ROWS))  # answers to commands
    # (source topic, message or command, why) of those for which something has failed, so that they were rejected.
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    status: dict[str, int] = field(default_factory=dict)  # counts of this tick and of the state after it
    # By source topic and subscription name: the last time that shaping has given a message, ms since the epoch.
    shaped_until: dict[str, dict[str, int]] = field(default_factory=dict)
    paused: dict[str, list[str]] = field(default_factory=dict)  # by source topic: names of the paused subscriptions
    # By source topic and subscription name, of slow ones in `Tick.drains`: how many messages go out, and whether others
    # wait.
    drained: dict[str, dict[str, tuple[int, bool]]] = field(default_factory=dict)
    # By source topic and subscription name, of resumed ones: how many messages are still parked, the bytes of their
    # payloads, and a time, ms since the epoch, before which none of them was due.
    resuming: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    # By source topic and subscription name: how many rows wait for the next tick's places, and the last place given.
    waiting: dict[str, dict[str, list[int]]] = field(default_factory=dict)


@dataclass(kw_only=True)
class TickInProgress:
    """A tick that a shard is applying, and its effects so far."""

    tick: Tick
    input: TickInput
    giving_up: GivingUp
    expiring: Expiring
    ends_seal_epoch: bool
    commands: pa.Table  # as COMMAND_ROWS: the input's and those of messages sent back, with schedule keys resolved
    effects: Effects = field(default_factory=Effects)
    outcomes: list[pa.Table] = field(default_factory=list)  # as OUTCOME_ROWS, without those of `given_up`
    given_up: list[GivenUp] = field(default_factory=list)
    n_taken: int = 0  # messages that came in
    n_left_out: int = 0  # messages that are left out: another cluster's job delivers them
    n_short_notice: int = 0  # released rows that were due when they came in, or were moved to now
    n_planned: int = 0  # released rows that waited in the tracker
