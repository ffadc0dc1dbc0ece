"""What one shard does in one tick. All decisions of the service are made here."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracker.buckets.delayed_delivery_tracker import DelayedDeliveryTracker
from tracker.commands.apply import RELEASED_A_SECOND, Control, Moment, with_released
from tracker.commands.cancelled import Compression
from tracker.commands.giving_up import GivenUp, GivingUp
from tracker.commands.moves import HELD_MILLIS, held
from tracker.commands.rebuilt import Rebuilt
from tracker.commands.repeats import FirstAnswers, no_answers
from tracker.commands.schema import CANCELS, COMMANDS, KNOWN, OUTCOMES, PAST, RESCHEDULE, RESTORE, Switch
from tracker.entry_log import EMPTY_ENTRIES, EntryLog
from tracker.in_flight import REJECTED, SENDING, InFlight, OpenReleases, Release
from tracker.messages import (
    MESSAGES,
    BoolArray,
    concat,
    in_order,
    int64,
    is_left_out,
    is_rejected,
    of_entries,
    where,
    with_columns,
)
from tracker.store import Store
from tracker.subscriptions import Subscriptions


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One step of the clock, the same for all shards, and the same when it is replayed.

    A turn is a tick at which buckets are sealed and segments are loaded. `booked` is the last turn before which all
    that came in is settled: in the delayed index, or delivered.
    """

    tick: int  # counts up from 1
    cutoff: int  # what is due at this time or before is handed out
    turn: int  # how many turns there have been, this tick's included
    load_horizon: int  # what is due before it is in state
    near_until: int  # what comes in due before it goes to a slot
    run: str  # the run of the job that made the tick
    confirmed: int  # the releases of this tick and earlier ones are finished
    booked: int
    now: int = 0  # ms since the epoch
    passed: int = 0  # what was published before the commands of this tick and earlier ones has come in
    sending: str = "{}"  # how releases of this tick are to be sent, also when they are handed out again
    # By source topic and subscription ("" for rejects) whose destination can't be written: `open`, the releases
    # [tick, is planned] that have not arrived there, and `rejects`, why what is due is rejected; not there: it waits.
    unwritable: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Intake:
    """What comes to a shard in a tick."""

    messages: pa.Table = field(default_factory=MESSAGES.empty_table)  # new ones, whole entries, in any order
    segment: pa.Table = field(default_factory=MESSAGES.empty_table)  # due from the last load horizon to this one
    commands: pa.Table = field(default_factory=COMMANDS.empty_table)
    request_ids: Mapping[str, int] = field(default_factory=dict)  # of all shards' commands that come first: the body
    found: pa.Table = field(default_factory=KNOWN.empty_table)  # messages that commands name, as far as they are booked
    kept: pa.Table = field(default_factory=MESSAGES.empty_table)  # sealed rows to move or restore
    switches: Sequence[Switch] = ()  # of the commands of all shards
    rebuilt: Rebuilt | None = None  # in the first tick after a rebuild
    no_commands: pa.Table = field(default_factory=MESSAGES.empty_table)  # of the control topic, with the reason
    first_answers: FirstAnswers = no_answers  # in the version of the tables in which `found` was found
    rejected: pa.Table = field(default_factory=MESSAGES.empty_table)  # before, and not told to the topic of rejects yet
    back: Collection[str] = ()  # topics to which messages go out again: `kept` has what was held back for them


@dataclass
class Effects:
    """What a tick leads to outside the shard."""

    releases: list[Release] = field(default_factory=list)
    bucket: pa.Table = field(default_factory=MESSAGES.empty_table)  # a sealed bucket
    cancels: pa.Table = field(default_factory=CANCELS.empty_table)  # sealed with it
    entries: pa.Table = field(default_factory=lambda: EMPTY_ENTRIES)  # entries that are booked now
    rejects: pa.Table = field(default_factory=MESSAGES.empty_table)  # messages that could not be taken
    outcomes: pa.Table = field(default_factory=OUTCOMES.empty_table)
    status: dict[str, int] = field(default_factory=dict)


class Shard:
    """A shard's tracker, its controls, its releases in flight and its entries, on one store.

    Args:
        store: the shard's state.
        subscriptions: of each source topic, or only their names where all of them are in the settings.
        min_index_count_per_bucket: the mutable bucket is sealed when it holds this many rows, else at each turn.
        tick_time_millis: Pulsar's tick.
        compression: of the bitmaps of what is taken back.
    """

    def __init__(
        self,
        store: Store,
        subscriptions: Subscriptions | Mapping[str, Sequence[str]],
        min_index_count_per_bucket: int,
        tick_time_millis: int = 1000,
        compression: Compression | None = None,
    ) -> None:
        self._store = store
        self._names = Subscriptions.of(subscriptions).names
        self._min_index_count = min_index_count_per_bucket
        self._tracker = DelayedDeliveryTracker(store)
        self._control = Control(store, subscriptions, tick_time_millis, compression)
        self._in_flight = InFlight(store)
        self._entries = EntryLog(store)

    def apply(self, tick: Tick, intake: Intake) -> Effects:
        """Takes in what came, applies commands, and hands out what is due."""
        last_turn, released, last_run, ahead = self._last()
        is_turn = tick.turn != last_turn
        if intake.rebuilt is not None:
            released = intake.rebuilt.released
        moment = Moment(tick.tick, tick.now, released, tick.passed)
        if released < ahead and intake.commands.num_rows:
            moment = replace(moment, ahead=ahead, waiting=self._tracker.waiting(released + 1, ahead))
        effects = Effects()
        self._control.unwritable = self._unwritable(tick)
        open_releases = self._open_releases(tick)
        opened = self._in_flight.confirm(tick.confirmed, open_releases)
        kept_open = concat([self._control.keep_open(release.rows, moment) for release in opened])
        giving_up = GivingUp(tick.unwritable, self._names, tick.tick, tick.now)
        rows = self._in_flight.take_open(giving_up.of(open_releases))
        next_sequence = functools.partial(self._control.next_sequence, moment)
        given_up = [giving_up.take(rows, int64(rows, "wants"), next_sequence)[0]]
        if tick.run != last_run:
            effects.releases += self._in_flight.all()

        if intake.rebuilt is not None:
            self._tracker.rebuild(intake.rebuilt.sealed)
            self._control.rebuild(intake.rebuilt, tick.now)
            self._control.release_held(held(intake.kept), moment)

        if intake.back:
            rows = concat([held(intake.kept), held(self._tracker.find(()))])
            self._control.come_back(intake.back, rows, moment)

        # Messages first, then commands: a command that was sent after its message finds it.
        messages = intake.messages
        rejected = is_rejected(messages)
        # After a rebuild messages may come again that are done with.
        is_done = self._control.wants(messages) == 0 if self._control.has_exceptions else np.zeros_like(rejected)
        outcomes = [self._control.arrive(messages, moment)]
        taken = _past_where(rejected, messages)
        known, is_new = self._known(intake, taken)
        self._entries.add(taken, tick.turn if is_turn else tick.turn + 1)
        effects.rejects = where(messages, rejected)
        short_notice = self._tracker.add_messages(where(messages, ~rejected & ~is_done), tick.cutoff)
        kept = self._kept(intake, messages, known)
        outcomes.append(
            self._control.apply(
                intake.commands,
                intake.request_ids,
                known,
                is_new,
                moment,
                kept,
                intake.switches,
                self._held(intake),
                intake.first_answers,
                outcomes[0],
            )
        )
        moved = self._tracker.add_moved(self._control.take_moves(), tick.cutoff)

        if is_turn or self._tracker.number_of_unsealed_messages >= self._min_index_count or kept_open.num_rows:
            effects.bucket = concat([self._tracker.seal(tick.load_horizon, tick.near_until), kept_open])
            effects.cancels = self._control.take_cancels()
        self._tracker.load_segment(intake.segment)
        if is_turn:
            outcomes.append(self._control.expire(moment))
            effects.entries = self._entries.take(tick.booked)

        planned = self._tracker.get_scheduled_messages(tick.cutoff)
        # What is left out goes nowhere, not to the rejects topic either.
        left_out = is_left_out(effects.rejects)
        told = self._told(tick, concat([where(effects.rejects, ~left_out), given_up[0].rejects]))
        told = concat([told, self._tell_again(tick, intake.rejected)])
        at_once = in_order(pa.concat_tables([told, short_notice, moved]))
        n_short, short_given_up = self._release(tick, effects, False, at_once, moment, giving_up)
        n_planned, planned_given_up = self._release(tick, effects, True, planned, moment, giving_up)
        given_up += [short_given_up, planned_given_up]
        effects.outcomes = concat([*outcomes, *(one.outcomes for one in given_up)], OUTCOMES)
        self._tracker.add_moved(self._control.take_moves(), tick.cutoff)
        effects.rejects = concat([effects.rejects, intake.no_commands, *(one.rejects for one in given_up)])
        if is_turn:
            # Not before what is due has been handed out: after a long pause it may be long due.
            self._tracker.drop_expired(tick.cutoff)
            self._control.drop_expired(tick.cutoff)
        effects.status = {
            "tick": tick.tick,
            "now": tick.now,
            "cutoff": tick.cutoff,
            "next_due": HELD_MILLIS if self._tracker.next_due is None else self._tracker.next_due,
            "taken": messages.num_rows,
            "rejected": effects.rejects.num_rows - int(left_out.sum()),
            "left_out": int(left_out.sum()),
            "short_notice": n_short - told.num_rows,
            "planned": n_planned,
            "sealed": effects.bucket.num_rows,
            "segment": intake.segment.num_rows,
            "delayed": self._tracker.number_of_delayed_messages - self._control.unwanted + self._in_flight.open,
            "loaded": self._tracker.number_of_loaded_messages,
            "in_flight": len(self._in_flight),
            "commands": intake.commands.num_rows,
            "waiting_commands": self._control.waiting,
            "taken_back": self._control.taken_back.count,
            "taken_back_bytes": self._control.taken_back.n_bytes,
        }
        self._save(tick)
        return effects

    def _known(self, intake: Intake, messages: pa.Table) -> tuple[pa.Table, BoolArray]:
        """The messages of the entries that commands name, and which of them came in only now and can be taken back."""
        if not intake.commands.num_rows:
            return KNOWN.empty_table(), np.zeros(0, np.bool_)
        wanted = intake.commands.select(["ledger_id", "entry_id"]).group_by(["ledger_id", "entry_id"]).aggregate([])
        new, recent, booked = (
            rows.select(KNOWN.names)
            .join(wanted, ["ledger_id", "entry_id"], join_type="inner", use_threads=False)
            .select(KNOWN.names)
            for rows in (messages, self._entries.all(), with_released(intake.found))
        )
        # An entry that is not booked yet is known here as a whole, in the delayed index perhaps in part.
        booked = booked.join(recent, ["ledger_id", "entry_id"], join_type="left anti", use_threads=False)
        is_new = np.zeros(new.num_rows + recent.num_rows + booked.num_rows, np.bool_)
        is_new[: new.num_rows] = int64(new, "deliver_at") > PAST
        return pa.concat_tables([new, recent, booked.select(KNOWN.names)]).cast(KNOWN), is_new

    def _kept(self, intake: Intake, messages: pa.Table, known: pa.Table) -> pa.Table:
        """Rows of the known messages that commands reschedule or restore, wherever they are."""
        kinds = pc.is_in(intake.commands["kind"], pa.array([RESCHEDULE, RESTORE]))
        if not pc.any(kinds).as_py():
            return MESSAGES.empty_table()
        wanted = intake.commands.filter(kinds).select(["ledger_id", "entry_id"])
        wanted = wanted.group_by(["ledger_id", "entry_id"]).aggregate([])
        known = known.join(wanted, ["ledger_id", "entry_id"], join_type="inner", use_threads=False)
        times = {*known["deliver_at"].to_pylist(), *self._control.moved_to(known)}
        return concat(of_entries(rows, wanted) for rows in (messages, self._tracker.find(times), intake.kept))

    def _held(self, intake: Intake) -> pa.Table:
        """What was held back, if a command says to hand it out."""
        if all(switch.is_paused for switch in intake.switches):
            return MESSAGES.empty_table()
        return concat([held(intake.kept), held(self._tracker.find(()))])

    def _release(
        self, tick: Tick, effects: Effects, is_planned: bool, rows: pa.Table, moment: Moment, giving_up: GivingUp
    ) -> tuple[int, GivenUp]:
        """Hands rows out to the subscriptions that want them; returns how many, and what of them is given up."""
        if not rows.num_rows:
            return 0, GivenUp()
        wants = self._control.hand_out(rows, moment)
        given_up, wants = giving_up.take(rows, wants, functools.partial(self._control.next_sequence, moment))
        is_wanted = is_rejected(rows) | (wants != 0)
        rows = where(rows.append_column("wants", pa.array(wants)), is_wanted)
        n = rows.num_rows
        if given_up.rejects.num_rows:
            told = self._told(tick, given_up.rejects)
            told = told.append_column("wants", pa.array(np.zeros(told.num_rows, np.int64)))
            rows = in_order(concat([rows, told], rows.schema))
        if rows.num_rows:
            release = Release(tick.tick, is_planned, rows.replace_schema_metadata({SENDING: tick.sending}))
            self._in_flight.add(release)
            effects.releases.append(release)
        return n, given_up

    def _told(self, tick: Tick, rejects: pa.Table) -> pa.Table:
        """What of new rejects goes to the topics for them: of those that can't be written the table keeps it."""
        held = [topic for topic, names in tick.unwritable.items() if "" in names]
        return rejects.filter(pc.invert(pc.is_in(rejects["topic"], pa.array(held, pa.string())))) if held else rejects

    def _tell_again(self, tick: Tick, rejects: pa.Table) -> pa.Table:
        """What of held back rejects goes out now; of many the rest waits for some seconds."""
        times = tick.now + np.arange(rejects.num_rows) // RELEASED_A_SECOND * 1000
        return self._tracker.add_moved(with_columns(rejects, deliver_at=pa.array(times)), tick.cutoff)

    def _unwritable(self, tick: Tick) -> dict[str, int]:
        """By topic the subscriptions for which what is due waits until their destinations can be written, as bits."""
        return {
            topic: sum(self._bit(topic, name) for name, one in names.items() if name and "rejects" not in one)
            for topic, names in tick.unwritable.items()
        }

    def _open_releases(self, tick: Tick) -> OpenReleases:
        found: dict[tuple[int, bool], dict[str, int]] = {}
        for topic, names in tick.unwritable.items():
            for name, unwritable in names.items():
                bit = self._bit(topic, name) if name else REJECTED
                for of_tick, planned in unwritable["open"]:
                    release = found.setdefault((of_tick, bool(planned)), {})
                    release[topic] = release.get(topic, 0) | bit
        return found

    def _bit(self, topic: str, name: str) -> int:
        names = list(self._names.get(topic, ()))
        return 1 << names.index(name) if name in names else 0

    def _last(self) -> tuple[int, int, str, int]:
        """The last tick's turn, cutoff and run, and the highest cutoff that there was."""
        turn, cutoff, run, *ahead = (self._store.get("shard", (0, 0)) or b"0 0 ").decode().split(" ")
        return int(turn), int(cutoff), run, int(ahead[0] if ahead else cutoff)

    def _save(self, tick: Tick) -> None:
        ahead = max(tick.cutoff, self._last()[3])
        last = f"{tick.turn} {tick.cutoff} {tick.run} {ahead}".encode()
        if last != self._store.get("shard", (0, 0)):
            self._store.put("shard", (0, 0), last)
        self._tracker.save()
        self._control.save()
        self._in_flight.save()
        self._entries.save()


def _past_where(rejected: BoolArray, messages: pa.Table) -> pa.Table:
    """The messages, the rejected ones with a past time: they are handed out at once, and no command takes them back."""
    if not rejected.any():
        return messages
    return with_columns(messages, deliver_at=pa.array(np.where(rejected, PAST, int64(messages, "deliver_at"))))
