"""Decides which of the messages with the same schedule key waits. The others are superseded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.commands.kinds import ANSWER, REPEAT
from tracker.commands.outcomes import superseded_outcomes
from tracker.context import Context
from tracker.due_time import MAX_TIME_MILLIS
from tracker.ends import moved_ends
from tracker.keys.cold_keys import group_of, times_of
from tracker.keys.live_keys import (
    FindKeyed,
    KeyHash,
    LastMessage,
    LiveKeys,
    last_messages,
    last_of_keys,
    none_sealed,
    positions,
)
from tracker.message_state.changes import HELD_DELIVER_AT
from tracker.message_state.parking import Parking
from tracker.message_state.state import MessageState
from tracker.messages import (
    FIRST_IMPORTED_LEDGER,
    BoolArray,
    Int64Array,
    are_recurring,
    concat,
    empty_table,
    int64,
    message_ids,
    typed,
    where,
    with_columns,
)
from tracker.properties import MessagePosition, Mode, key_hash, key_rule
from tracker.schemas import KNOWN, OUTCOME_ROWS
from tracker.store import Store
from tracker.subscriptions import ALSO_LATER, by_topic, numbers_in

_POSITION = ("ledger_id", "entry_id", "batch_index")

# Values of `_KeyState.until`: the message waits for its time, whenever the next one was published; or it does not.
_ALWAYS = MAX_TIME_MILLIS + 1

_NEVER = -1


@dataclass
class _KeyState:
    """The state of a key while a tick's messages are decided on, one after another.

    Attributes:
        message: the last message of the key so far.
        row: the message's index among the tick's messages; None: it came in earlier.
        until: ms since the epoch: for messages published before, the message still waits for its time.
        is_parked: whether the message is parked: its time has come, but it still waits.
    """

    message: LastMessage
    row: int | None
    until: int
    is_parked: bool = False

    def is_after(self, position: MessagePosition) -> bool:
        """Whether a message came in before this one, and comes in again after a rebuild, as it does not yield to it.

        Ids of imported messages, and of those of another broker, say nothing about the order.
        """
        last = self.message.position
        is_comparable = last.partition == position.partition and last.ledger_id < FIRST_IMPORTED_LEDGER
        return self.row is None and is_comparable and position < last


class _DueHandling(NamedTuple):
    """How a topic's messages that are due when they come in are handled."""

    is_parked: bool  # they are parked for all subscriptions
    may_wait: bool  # for some subscriptions they may be parked, or shaped


@dataclass(frozen=True)
class DecidedMessages:
    """A tick's messages, after the decisions about their schedule keys.

    Attributes:
        messages: as MESSAGES: the same rows, some with another `deliver_at`.
        dropped: bool, (messages,): the message is superseded at once, and is not added to the tracker.
        outcomes: as OUTCOME_ROWS: of all superseded messages.
    """

    messages: pa.Table
    dropped: BoolArray
    outcomes: pa.Table


class Superseding:
    """Decides which message of a schedule key waits.

    The messages of a tick are decided on one after another: those of a partition in their order, those of several
    partitions by publish time. A message that is due when it comes in is delivered, and the key begins again with the
    next message that was published after its time.

    A key that no message or command has named for a while becomes cold: only the delayed index has its last message.
    The key becomes hot again when a message or command names it, or when its last message is loaded.

    Args:
        state: knows which messages commands have cancelled and moved, and records which are superseded.
        parking: knows which subscriptions' messages are parked.
        idle_millis: a key becomes cold when nothing has named it for at least this time, ms.
    """

    def __init__(self, context: Context, state: MessageState, parking: Parking, idle_millis: int) -> None:
        self._context = context
        self._subscriptions = context.subscriptions
        self._state = state
        self._parking = parking
        self._messages = KeyedMessages(context, state)
        self._idle_millis = idle_millis
        self._keys = LiveKeys(context.store)
        self._taken_over = TakenOver(context.store)
        self._new: set[KeyHash] = set()  # keys whose last message came in in this tick
        self._find_keyed: FindKeyed = none_sealed
        self._complete_until = 0

    def __len__(self) -> int:
        """The number of keys, hot and cold; the messages of some do not wait any more."""
        return len(self._keys)

    @property
    def n_cold(self) -> int:
        """The number of keys that are cold."""
        return self._keys.n_cold

    def begin_tick(self, find_keyed: FindKeyed, complete_until: int) -> None:
        """Begins a tick.

        Args:
            find_keyed: reads a delayed index that has all buckets sealed before the last call of `sweep`.
            complete_until: ms since the epoch: messages due before it were in state after the last tick.
        """
        self._new, self._find_keyed, self._complete_until = set(), find_keyed, complete_until

    def decide_new(self, messages: pa.Table, is_new: BoolArray) -> DecidedMessages:
        """Decides on new messages, before they are added to the tracker.

        Args:
            messages: as MESSAGES, in any order.
            is_new: bool, (messages,): the message is neither rejected nor known already.
        """
        is_keyed = is_new & pc.is_valid(messages["schedule_key"]).to_numpy(zero_copy_only=False)
        chosen, times = _in_order(messages, np.flatnonzero(is_keyed))
        rows = messages.take(pa.array(chosen))
        topics, keys = rows["topic"].to_pylist(), rows["schedule_key"].to_pylist()
        hash_of = {pair: key_hash(*pair) for pair in set(zip(topics, keys, strict=True))}
        states = self._states([(*pair, hashed) for pair, hashed in sorted(hash_of.items())])
        due, published = int64(rows, "deliver_at").copy(), rows["publish_time"].to_pylist()
        counts_at, recurs = times.tolist(), are_recurring(rows).tolist()
        since = np.zeros(rows.num_rows, np.int64)
        dropped = np.zeros(rows.num_rows, np.bool_)
        # After a rebuild, messages that had been cancelled come in again.
        is_gone = (
            self._state.subscription_masks(rows) == 0
            if self._state.has_exceptions
            else np.zeros(rows.num_rows, np.bool_)
        )
        handling = {topic: self._due_handling(topic) for topic in set(topics)}
        ids = [rows[name].to_pylist() for name in LastMessage._fields[:5]]
        at = [MessagePosition(*position) for position in zip(*ids[:4], strict=True)]
        own_since = self._taken_over.take_since(topics, at)
        # Topic, key, the superseded message, and the message that it yields to.
        superseded: list[tuple[str, str, _KeyState, LastMessage]] = []
        for i, (topic, key, properties) in enumerate(zip(topics, keys, rows["properties"].to_pylist(), strict=True)):
            hashed = hash_of[topic, key]
            before = states.get(hashed)
            waits_for_time = before is not None and before.until > counts_at[i]
            # A message moved for one subscription only may come in again after a rebuild: it does not precede itself.
            is_itself = before is not None and before.message.position == at[i]
            since[i] = own_since.get(at[i], published[i])
            if before is not None and (waits_for_time or is_itself):
                since[i] = before.message.since
            rule = key_rule(dict(properties))
            if rule.mode is Mode.DEBOUNCE and rule.debounce_max_millis is not None:
                due[i] = min(int(due[i]), int(since[i]) + rule.debounce_max_millis)
            message = LastMessage._make([*(column[i] for column in ids), int(due[i]), int(since[i])])
            if is_gone[i] or (before is not None and before.is_after(at[i])):
                continue
            if rule.mode is Mode.KEEP and before is not None and waits_for_time and not is_itself:
                superseded.append((topic, key, _KeyState(message, i, _ALWAYS), before.message))
                dropped[i] = True
                continue
            # With the mode `keep`, a new message yields only to one that waits for its time, not to one parked.
            waits = before is not None and (waits_for_time or before.is_parked) and not is_itself
            if before is not None and waits and rule.mode is not Mode.KEEP:
                superseded.append((topic, key, before, message))
                if before.row is not None:
                    dropped[before.row] = True
            # A recurring message waits also after it was due: for its next occurrence.
            is_due = message.deliver_at <= self._context.now and not recurs[i] and not is_itself
            until = message.deliver_at if is_due else _ALWAYS
            states[hashed] = _KeyState(message, i, until, is_due and handling[topic].is_parked)
        changed = {hashed: state for hashed, state in states.items() if state.row is not None}
        may_wait = {hash_of[pair] for pair in hash_of if handling[pair[0]].may_wait}
        self._keys.update(
            {h: state.message if state.until == _ALWAYS or h in may_wait else None for h, state in changed.items()}
        )
        self._new = set(changed)
        outcomes = self._supersede(superseded)
        return DecidedMessages(*_with_decisions(messages, chosen, due, since, dropped), outcomes)

    def resolve_commands(self, commands: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Finds the messages that commands name by schedule key, and sets the positions of these commands.

        The messages of this tick have been decided on.

        Args:
            commands: as COMMAND_ROWS.

        Returns:
            the commands, as COMMAND_ROWS, with a position of -1 if no message waits; and the found messages of
            earlier ticks, as KNOWN.
        """
        is_by_key = pc.and_(pc.is_valid(commands["schedule_key"]), pc.less(commands["ledger_id"], 0))
        is_by_key = pc.and_(is_by_key, pc.invert(pc.is_in(commands["kind"], pa.array([ANSWER, REPEAT]))))
        chosen = np.flatnonzero(is_by_key.to_numpy(zero_copy_only=False))
        if not len(chosen):
            return commands, empty_table(KNOWN)
        rows = commands.take(pa.array(chosen))
        pairs = list(zip(rows["topic"].to_pylist(), rows["schedule_key"].to_pylist(), strict=True))
        names = [(*pair, key_hash(*pair)) for pair in sorted(set(pairs))]
        found = self._find(names)
        known = _as_known([(topic, key, found[hashed]) for topic, key, hashed in names if hashed in found])
        hashes = [key_hash(topic, key) for topic, key in zip(*_pairs(known), strict=True)]
        is_new = np.array([hashed in self._new for hashed in hashes], np.bool_)
        is_past = self._messages.are_waiting(known)[2]
        is_there = ~is_past | is_new
        there = {hashed for hashed, is_one in zip(hashes, is_there.tolist(), strict=True) if is_one}
        columns = {name: int64(commands, name).copy() for name in _POSITION}
        for i, pair in zip(chosen.tolist(), pairs, strict=True):
            if (hashed := key_hash(*pair)) in there:
                for name in _POSITION:
                    columns[name][i] = getattr(found[hashed], name)
        resolved = with_columns(
            commands, **{name: pa.array(columns[name]).cast(commands[name].type) for name in _POSITION}
        )
        return resolved, where(known, is_there & ~is_new)

    def warm_named(self, known: pa.Table) -> None:
        """Makes the keys of messages that commands name by id hot again.

        Args:
            known: as KNOWN: messages of this shard.
        """
        self._find([(*pair, key_hash(*pair)) for pair in _keyed_pairs(known)])

    def warm_loaded(self, segment: pa.Table) -> None:
        """Makes the keys hot again whose last messages are loaded.

        Args:
            segment: as MESSAGES: the rows that are loaded.
        """
        if not self._keys.n_cold:
            return
        rows = segment.filter(pc.and_(pc.is_valid(segment["schedule_key"]), pc.is_null(segment["sequence"])))
        hash_of = {pair: key_hash(*pair) for pair in _keyed_pairs(rows)}
        _, groups = self._look(hash_of.values())
        self._warm(rows, hash_of, groups)

    def sweep_keys(self, load_horizon: int, complete_until: int) -> None:
        """Forgets keys whose message is past, and makes idle ones cold, in a part of the map.

        Args:
            load_horizon: of this tick, ms since the epoch.
            complete_until: ms since the epoch: messages due before it are in state.
        """

        def judge(rows: pa.Table) -> tuple[BoolArray, BoolArray]:
            # A message due beyond the load horizon went to the mutable bucket, and was sealed by the last call. The key
            # of a cancelled one stays hot: the index does not find it, but commands that name it get an answer.
            rests = (int64(rows, "deliver_at") >= load_horizon) & ~self._messages.are_cancelled(rows)
            return self._messages.are_past_for_all(rows), rests

        self._keys.sweep(judge, complete_until, self._context.now, self._idle_millis)
        self._taken_over.sweep(self._context.now)

    def rebuild(self, rows: pa.Table) -> None:
        """Restores the keys after a rebuild, from LIVE_KEYS."""
        comes_again = pc.is_valid(rows["comes_again"]).to_numpy(zero_copy_only=False)
        self._taken_over.add_messages(where(rows, comes_again))
        rows = where(rows, ~comes_again)
        hashes = [key_hash(*pair) for pair in zip(*_pairs(rows), strict=True)]
        self._keys.update(dict(zip(hashes, last_messages(rows), strict=True)))

    def save(self) -> None:
        """Writes the changes to the store."""
        self._keys.save()
        self._taken_over.save()

    def _states(self, names: list[tuple[str, str, KeyHash]]) -> dict[KeyHash, _KeyState]:
        """Returns the states of keys (topic, key, hash) before this tick; keys without a last message are left out."""
        found = self._find(names)
        if not found:
            return {}
        there = [(topic, key, hashed) for topic, key, hashed in names if hashed in found]
        waits, for_time, _ = self._messages.are_waiting(_as_known([(t, k, found[h]) for t, k, h in there]))
        return {
            hashed: _KeyState(found[hashed], None, _ALWAYS if for_time[i] else _NEVER, bool(waits[i] & ~for_time[i]))
            for i, (_, _, hashed) in enumerate(there)
        }

    def _due_handling(self, topic: str) -> _DueHandling:
        """Returns how a topic's messages that are due when they come in are handled."""
        active = self._subscriptions.active(topic)
        parked = self._parking.parked_mask(topic) & active
        return _DueHandling(parked == active, bool(parked or self._subscriptions.shaping.get(topic)))

    def _find(self, names: list[tuple[str, str, KeyHash]]) -> dict[KeyHash, LastMessage]:
        """Returns the last messages of keys (topic, key, hash) that have one; makes cold keys hot again."""
        found, groups = self._look(hashed for _, _, hashed in names)
        groups = {
            hashed: [g for g in of if times_of((g, g))[1] >= self._complete_until] for hashed, of in groups.items()
        }
        if all_groups := sorted({group for of in groups.values() for group in of}):
            hash_of = {(topic, key): hashed for topic, key, hashed in names if groups.get(hashed)}
            rows = self._find_keyed(hash_of.keys(), all_groups)
            # Messages due before have been loaded, so that their keys are hot or past.
            rows = where(rows, int64(rows, "deliver_at") >= self._complete_until)
            found |= self._warm(rows, hash_of, groups)
        return found

    def _look(self, hashes: Iterable[KeyHash]) -> tuple[dict[KeyHash, LastMessage], dict[KeyHash, list[int]]]:
        """Returns the last messages of the hot ones of some keys, and the groups of those that may be cold."""
        hashes = list(hashes)
        found = self._keys.find_hot(hashes)
        return found, self._keys.find_cold(hashed for hashed in hashes if hashed not in found)

    def _warm(
        self,
        rows: pa.Table,
        hash_of: Mapping[tuple[str, str], KeyHash],
        groups: Mapping[KeyHash, list[int]],
    ) -> dict[KeyHash, LastMessage]:
        """Makes the cold keys hot again whose last messages are among some rows; returns these messages.

        Args:
            rows: with the columns of KEYED.
            hash_of: by topic and key: the key's hash.
            groups: the groups of keys that may be cold.
        """
        chosen = [
            group_of(due) in groups.get(hash_of.get(pair, (0, 0)), ())
            for pair, due in zip(zip(*_pairs(rows), strict=True), rows["deliver_at"].to_pylist(), strict=True)
        ]
        rows = where(rows, np.array(chosen, np.bool_))
        if not rows.num_rows:
            return {}
        rows = where(rows, self._messages.are_waiting(rows.select(KNOWN.names))[0])
        found = {hash_of[pair]: message for pair, message in last_of_keys(rows).items()}
        for hashed, message in found.items():
            self._keys.warm(hashed, message)
        return found

    def _supersede(self, superseded: list[tuple[str, str, _KeyState, LastMessage]]) -> pa.Table:
        if not superseded:
            return empty_table(OUTCOME_ROWS)
        rows = _as_known([(topic, key, one.message) for topic, key, one, _ in superseded])
        others = [other for _, _, _, other in superseded]
        yields_to = pa.array([str(other.position) for other in others])
        is_new = np.array([one.row is not None for _, _, one, _ in superseded], np.bool_)
        since = pa.array([other.since for other in others], pa.int64())
        return self._messages.supersede_messages(rows, yields_to, since, is_new)


def _in_order(messages: pa.Table, chosen: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Orders messages by position within a partition, by publish time across them; returns indexes and these times."""
    rows = messages.take(pa.array(chosen))
    topics = rows["topic"].combine_chunks().dictionary_encode().indices.to_numpy()
    partition, *position, published = (
        int64(rows, name) for name in ("partition", "ledger_id", "entry_id", "batch_index", "publish_time")
    )
    order = np.lexsort([*position[::-1], partition, topics])
    # No message counts as published before its predecessor in the partition, whatever its producer's clock says.
    counts_at = published[order]
    starts = np.flatnonzero(np.diff(partition[order], prepend=-2) | np.diff(topics[order], prepend=-1))
    ends = np.append(starts[1:], len(order))[: len(starts)]  # none, where there are no messages
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        np.maximum.accumulate(counts_at[start:end], out=counts_at[start:end])
    by_time = np.argsort(counts_at, kind="stable")
    return chosen[order[by_time]], counts_at[by_time]


def _with_decisions(
    messages: pa.Table, chosen: Int64Array, due: Int64Array, since: Int64Array, dropped: BoolArray
) -> tuple[pa.Table, BoolArray]:
    """Sets the times of the chosen messages, and their ends; returns all messages, and a mask of those dropped."""
    all_due, all_dropped = int64(messages, "deliver_at").copy(), np.zeros(messages.num_rows, np.bool_)
    all_since, has_since = np.zeros((2, messages.num_rows), np.int64)
    all_due[chosen], all_dropped[chosen], all_since[chosen], has_since[chosen] = due, dropped, since, 1
    times = pa.array(all_since, mask=has_since == 0)
    if (is_earlier := all_due != int64(messages, "deliver_at")).any():
        ends = moved_ends(where(messages, is_earlier), all_due[is_earlier])["expires_at"].combine_chunks()
        all_ends = messages["expires_at"].combine_chunks()
        messages = with_columns(messages, expires_at=pc.replace_with_mask(all_ends, pa.array(is_earlier), ends))
    return with_columns(messages, deliver_at=pa.array(all_due), key_since=times), all_dropped


def _as_known(named: list[tuple[str, str, LastMessage]]) -> pa.Table:
    """Returns messages, each with its topic and key, as KNOWN."""
    rows = positions([message for _, _, message in named])
    values = {name: rows[name] for name in rows.column_names}
    values |= {"topic": pa.array([topic for topic, _, _ in named], pa.string())}
    values |= {"schedule_key": pa.array([key for _, key, _ in named], pa.string())}
    return typed(values, KNOWN)


def _keyed_pairs(rows: pa.Table) -> list[tuple[str, str]]:
    """Returns the distinct pairs of topic and key of the rows that have a key."""
    return sorted({pair for pair in zip(*_pairs(rows), strict=True) if pair[1] is not None})


def _pairs(rows: pa.Table) -> tuple[list[str], list[str]]:
    return rows["topic"].to_pylist(), rows["schedule_key"].to_pylist()


class KeyedMessages:
    """Tells which messages with a schedule key wait, and cancels those that are superseded.

    Args:
        state: knows which messages commands have cancelled and moved.
    """

    def __init__(self, context: Context, state: MessageState) -> None:
        self._context = context
        self._subscriptions = context.subscriptions
        self._state = state

    def supersede_messages(self, rows: pa.Table, yields_to: pa.Array, since: pa.Array, is_new: BoolArray) -> pa.Table:
        """Cancels superseded messages, for all subscriptions for which they wait.

        Args:
            rows: as KNOWN, distinct messages.
            yields_to: strings, (rows,): the position of the message of the same key that supersedes each.
            since: int64, (rows,), ms since the epoch: when the first message of the key was published.
            is_new: bool, (rows,): the message came in in this tick. Its row goes neither to the tracker nor to a table.

        Returns:
            as OUTCOME_ROWS, also for subscriptions that are added later.

        Raises:
            SequencesExhaustedError: the tick has more commands and moves than there are sequences.
        """
        are_dispatched = self._context.are_dispatched(rows, is_new)
        kept = where(rows, ~is_new)
        wanted = self._state.masks_with_removed(kept) != 0
        masks = by_topic(rows, self._subscriptions.all_of)
        is_cancelled = np.zeros(rows.num_rows, np.bool_)
        outcomes = []
        for subscription in numbers_in(masks):
            chosen = np.flatnonzero(masks >> subscription & 1)
            chosen_rows = rows.take(pa.array(chosen))
            cancelled, is_late, moves, moved_to = self._state.delivery_state(
                subscription, chosen_rows, are_dispatched[chosen]
            )
            is_retry = self._state.moved.are_retries(subscription, message_ids(chosen_rows))
            now = np.flatnonzero(~cancelled & ~is_late & ~is_retry)
            if not len(now):
                continue
            self._state.unwanted_moves += int((moves[now] > 0).sum())
            until = np.maximum(int64(chosen_rows, "deliver_at"), moved_to)[now]
            done, chosen = chosen_rows.take(pa.array(now)), chosen[now]
            self._state.cancel_messages(
                subscription, done, int64(done, "batch_index") < 0, until + self._context.remembered_millis
            )
            is_cancelled[chosen] = True
            sequence = self._context.next_sequence()
            names = self._subscriptions.names_of(done["topic"], subscription)
            at = pa.array(chosen)
            outcomes.append(
                superseded_outcomes(done, names, yields_to.take(at), since.take(at), sequence, self._context.now)
            )
            is_kept = ~is_new[chosen]
            self._state.record_operation("CANCEL", where(outcomes[-1], is_kept), sequence, until[is_kept])
        # A subscription that is added later gets the messages that wait in the delayed index, except these.
        later = np.flatnonzero(is_cancelled & ~is_new)
        if len(later):
            at, names = pa.array(later), pa.repeat(ALSO_LATER, len(later))
            sequence = self._context.next_sequence()
            found = superseded_outcomes(
                rows.take(at), names, yields_to.take(at), since.take(at), sequence, self._context.now
            )
            outcomes.append(found)
        still_wanted = self._state.masks_with_removed(kept) != 0
        self._state.count_unwanted(where(kept, wanted & ~still_wanted), 1)
        return concat(outcomes, OUTCOME_ROWS)

    def are_waiting(self, rows: pa.Table) -> tuple[BoolArray, BoolArray, BoolArray]:
        """Tells which messages of earlier ticks wait.

        Args:
            rows: as KNOWN.

        Returns:
            three masks, bool, (rows,):
            1. The message waits for at least one subscription.
            2. It waits for its time (is not parked) for at least one subscription, and none has got it yet.
            3. Its time has come for all subscriptions, whether it is cancelled or not.
        """
        are_dispatched = self._context.are_dispatched(rows)
        masks = by_topic(rows, self._subscriptions.all_of)
        wanted = self._state.without_removed(rows, masks)
        waits, waits_for_time, has_been_had, is_past = np.zeros((4, rows.num_rows), np.bool_)
        is_past[:] = True
        for subscription in numbers_in(masks):
            is_of = masks >> subscription & 1 > 0
            cancelled, is_late, _, moved_to = self._state.delivery_state(subscription, rows, are_dispatched)
            # A retry has nothing to do with the message's schedule key.
            is_late |= self._state.moved.are_retries(subscription, message_ids(rows))
            is_waiting = is_of & ~cancelled & ~is_late
            waits |= is_waiting
            waits_for_time |= is_waiting & (moved_to != HELD_DELIVER_AT)
            has_been_had |= (wanted >> subscription & 1 > 0) & ~cancelled & is_late
            is_past &= is_late | ~is_of
        return waits, waits_for_time & ~has_been_had, is_past

    def are_past_for_all(self, rows: pa.Table) -> BoolArray:
        """Tells which messages of earlier ticks are past for all subscriptions. They need no topic.

        Args:
            rows: with the columns of KNOWN, except the topic.

        Returns:
            bool, (rows,).
        """
        are_dispatched = self._context.are_dispatched(rows)
        past = np.ones(rows.num_rows, np.bool_)
        for subscription in range(self._subscriptions.max_count):
            is_retry = self._state.moved.are_retries(subscription, message_ids(rows))
            past &= self._state.delivery_state(subscription, rows, are_dispatched).is_late | is_retry
        return past

    def are_cancelled(self, rows: pa.Table) -> BoolArray:
        """Tells which messages are cancelled for at least one subscription: bool, (rows,). They need no topic."""
        found = np.zeros(rows.num_rows, np.bool_)
        if self._state.cancelled:
            for subscription in range(self._subscriptions.max_count):
                found |= self._state.cancelled.contains(subscription, message_ids(rows))
        return found


class TakenOver:
    """Remembers, for messages that superseded another one of their key before a rebuild, when the key began.

    Such a message comes in again after the rebuild, but the superseded one does not wait any more. Without this the key
    would begin again with the message, and `debounceMax` would count from it.
    """

    def __init__(self, store: Store) -> None:
        self._rows = LiveKeys(store, "schedule_keys_taken_over")

    def add_messages(self, rows: pa.Table) -> None:
        """Adds the rows of LIVE_KEYS that have `comes_again`."""
        named = zip(rows["topic"].to_pylist(), last_messages(rows), strict=True)
        self._rows.update({_hash_of(topic, message.position): message for topic, message in named})

    def take_since(self, topics: Iterable[str], positions: Sequence[MessagePosition]) -> dict[MessagePosition, int]:
        """Looks messages up, forgets the ones found, and returns when their keys began.

        Args:
            topics: the topic of each message.

        Returns:
            by position: publish time of the first message since the key began again, ms since the epoch.
        """
        if not len(self._rows):
            return {}
        hashes = [_hash_of(topic, position) for topic, position in zip(topics, positions, strict=True)]
        found = self._rows.find_hot(hashes)
        self._rows.update(dict.fromkeys(found))
        return {position: found[one].since for one, position in zip(hashes, positions, strict=True) if one in found}

    def sweep(self, now: int) -> None:
        """Forgets messages that have been remembered long enough, in a part of the map.

        Args:
            now: ms since the epoch.
        """

        def judge(rows: pa.Table) -> tuple[BoolArray, BoolArray]:
            return int64(rows, "deliver_at") <= now, np.zeros(rows.num_rows, np.bool_)

        self._rows.sweep(judge, now, now, 0)

    def save(self) -> None:
        """Writes the changes to the store."""
        self._rows.save()


def _hash_of(topic: str, position: MessagePosition) -> KeyHash:
    return key_hash(topic, str(position))
