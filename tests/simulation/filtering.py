"""Commands by a filter in a simulation: the real code finds on real Delta tables which messages they name.

It is what the command line runs, and does as the admin API: it reads the source topic, lists the tables, and makes the
commands. Between two tables the job goes on. The commands go to the control topic of the simulated cluster, and nobody
waits for the answers: these are in the accounts as all others.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import delaylake.control
import pyarrow.compute as pc
from rich.console import Console

import admin.control.bulk
import admin.control.client
import warehouse.delta.snapshot
import warehouse.queries.unsealed_messages
from admin.control.bulk import Call, Change, CumulativeError, TooManyError, requests
from conf.settings import Settings
from jobs.commands.messages.by_filter import Bulk, _by_control_topic
from jobs.options import Output
from tests.simulation.accounts import BrokenGuaranteeError, Pair, require
from tests.simulation.broker import Admin
from tests.simulation.expected import entry_of
from tests.simulation.live_tables import open_live, require_old
from tests.simulation.retaining import delivered_for_good, pairs_of
from tests.simulation.scheduler import STAND_INS, Process
from tracker.commands.kinds import POSTPONE, RESCHEDULE, SKIP
from tracker.wire.delaylake_pb2 import ControlCommand
from warehouse.queries.listing import PendingFilter, VersionGoneError

if TYPE_CHECKING:
    from tests.simulation.world import World

_MOST = 8  # messages of a command that may not be for more
_USUAL_MOST = 10_000


@dataclass(frozen=True)
class Asked:
    """What a user asks for all messages that match a filter.

    Attributes:
        operation: as `Command.operation`.
        key: of the messages; empty: any.
        since, until: when they are due, ms since the epoch; `until` 0: at any time from `since` on.
        value: as `Command.value`.
    """

    operation: str
    topic: str
    subscription: str
    key: str
    since: int
    until: int
    value: int

    def has(self, due: int) -> bool:
        """Whether a time is one of those."""
        return self.since <= due and (not self.until or due < self.until)


class Filters:
    """The users who name messages by filters.

    Attributes:
        are_used: whether there are any in this seed.
        send: puts a command on the control topic.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = random.Random(f"filters of seed {world.plan.seed}")
        # What an import brings in has no account of commands.
        is_plain = not world.other_system.are_made
        self.are_used = self._chance.random() < world.plan.rates.get("seeds with filters", 0.0) and is_plain
        self.send: Callable[[ControlCommand], None] = lambda message: None
        self._n = self._n_changes = 0

    def begin(self, asked: Asked) -> None:
        """Somebody starts a command, unless the tables are lost."""
        world = self._world
        if world.backups.is_lost:
            return
        self._n += 1
        process = Process(f"filter {self._n}", world.clock_ahead)
        world.trace(f"{process.name} starts: {asked}")
        world.scheduler.start(process, "main", partial(self._run, process, asked))

    def _run(self, process: Process, asked: Asked) -> None:
        world = self._world
        most = _MOST if self._chance.random() < 0.2 else _USUAL_MOST
        world.rebuilds[process] = change = FilteredChange(world, asked, most)
        why = "it is done"
        try:
            why = change.run()
        except BrokenGuaranteeError as error:
            world.break_off(f"{process.name}: {error}")
        finally:
            del world.rebuilds[process]
        world.trace(f"{process.name} ends: {why}")
        world.end(process)

    def new_id(self) -> str:
        """Returns what the request ids of a change begin with, which else is drawn at random."""
        self._n_changes += 1
        return f"f{self._n_changes}"


@dataclass(frozen=True)
class _Known:
    """What the accounts and the tables together say of a topic's messages at one time.

    Attributes:
        waiting: what waits for certain, and the index has it; when it is due, ms since the epoch.
        cancelled: what was cancelled for certain, and the index knows it; when it would be due.
        delivered: what `deliveries` has.
        over: what was delivered for certain, and does not come again.
        is_rebuilt: the tables are written anew.
        n_rebuilds: so often they were.
    """

    waiting: dict[Pair, int]
    cancelled: dict[Pair, int]
    delivered: set[Pair]
    over: set[Pair]
    is_rebuilt: bool
    n_rebuilds: int

    @staticmethod
    def of(world: World, topic: str) -> _Known:
        accounts, expected = world.oracle.accounts, world.oracle.expected
        times, cancels = _indexed(world, topic)
        delivered = pairs_of(world.logs["deliveries"].rows(world.logs["deliveries"].newest))
        for_good = delivered_for_good(world)
        waiting: dict[Pair, int] = {}
        cancelled: dict[Pair, int] = {}
        over = set()
        for pair, account in accounts.accounts.items():
            position, name = pair
            message = expected[position]
            is_vague = account.is_unsure or account.ends_at or account.earlier or message.schedule_key is not None
            if message.topic != topic or is_vague or accounts.is_unanswered(position, name):
                continue
            indexed = _place(position)
            own, of_all = times.get((indexed, name), set()), times.get((indexed, ""), set())
            is_indexed = account.due in own if account.is_moved else bool(own | of_all)
            whole = f"{entry_of(position)}:-1"
            is_cancel_indexed = any((one, of) in cancels for one in (indexed, whole) for of in ("", name))
            if account.is_cancelled and is_indexed and is_cancel_indexed:
                cancelled[pair] = account.due
            elif not account.is_gone and pair in for_good:
                if not accounts.operations_for(position) & {"RETRY", "RESTORE"}:
                    over.add(pair)
            # What was cancelled before it came, and too late, is not listed (docs/pending.md).
            elif not account.is_gone and is_indexed and not is_cancel_indexed and pair not in delivered:
                waiting[pair] = account.due
        n_rebuilds = accounts.n_rebuilds + world.backups.n_restored
        return _Known(waiting, cancelled, delivered, over, world.is_written_anew(), n_rebuilds)


def _place(position: str) -> str:
    """Returns a message's place without its partition, which a cancel need not name."""
    return f"{entry_of(position)}:{position.rpartition(':')[2]}"


def _indexed(world: World, topic: str) -> tuple[dict[Pair, set[int]], set[Pair]]:
    """Returns when the index has each message due, and what its cancels name, by place; subscription empty: for all."""
    index = world.logs["delayed_index"]
    rows = index.rows(index.newest)
    rows = rows.filter(pc.equal(rows["topic"], topic))
    times: dict[Pair, set[int]] = {}
    cancels: set[Pair] = set()
    names = ("operation", "ledger_id", "entry_id", "batch_index", "subscription", "deliver_at")
    for kind, ledger, entry, number, name, due in zip(*(rows[one].to_pylist() for one in names), strict=True):
        pair = f"{ledger}:{entry}:{number}", name or ""
        if kind == "DELAY":
            times.setdefault(pair, set()).add(due)
        elif kind == "CANCEL":
            cancels.add(pair)
    return times, cancels


class FilteredChange:
    """A run of a command by a filter. What it names is held against the accounts before and after it has read."""

    def __init__(self, world: World, asked: Asked, most: int) -> None:
        self._world, self.copy, self._asked, self._most = world, world.live_tables(), asked, most
        for name in world.logs:
            self.copy.bring(name)
        self._before = _Known.of(world, asked.topic)
        self._began_at = world.scheduler.now

    def run(self) -> str:
        """Returns how it ended."""
        asked, kind = self._asked, self._asked.operation.lower()
        settings: Settings = self._world.settings.model_copy(update={"warehouse": self.copy.uri})
        wanted = PendingFilter(
            subscription=asked.subscription,
            key=asked.key or None,
            due_from=max(asked.since, 0),
            due_before=asked.until or None,
        )
        field = {RESCHEDULE: "deliver_at", POSTPONE: "by_millis"}.get(kind)
        change = Change(kind, {field: asked.value} if field else {})
        bulk = Bulk(asked.topic, wanted, change, False, self._most, True, 60.0, Output.JSON)
        try:
            found = _by_control_topic(settings, bulk, lambda n, listed: None, Console(file=io.StringIO()))
        except CumulativeError as error:
            require(kind == SKIP and self._is_cumulative(settings), str(error))
            return str(error)
        except TooManyError as error:
            n = sum(one.topic == asked.topic for one in self._world.oracle.expected.values())
            require(n > self._most, f"{error}, and {n} were sent")
            return str(error)
        except VersionGoneError as error:
            require_old(f"{asked}", self._world.scheduler.now - self._began_at, error)
            return str(error)
        require(found["matched"] <= self._most, f"{found['matched']} were changed, and {self._most} at most may be")
        return f"{found['matched']} match"

    def _is_cumulative(self, settings: Settings) -> bool:
        subscriptions = [s for route in settings.routes for s in route.subscriptions]
        return any(s.type.is_cumulative for s in subscriptions if s.name == self._asked.subscription)

    def made(self, commands: Sequence[ControlCommand]) -> None:
        """The commands are made: what they name is what `pending` lists, by docs/pending.md.

        Everything that has waited since before the command began, and matches, is named; nothing that was delivered or
        cancelled before, or does not match.
        """
        world, asked, before = self._world, self._asked, self._before
        after = _Known.of(world, asked.topic)
        named = {pair for one in commands for pair in self._named(one)}
        if before.is_rebuilt or after.is_rebuilt or before.n_rebuilds != after.n_rebuilds:
            return
        waiting = {pair: due for pair, due in before.waiting.items() if after.waiting.get(pair) == due}
        cancelled = {pair: due for pair, due in before.cancelled.items() if after.cancelled.get(pair) == due}
        wanted, others = (cancelled, waiting) if asked.operation == "RESTORE" else (waiting, cancelled)
        missing = {pair for pair, due in wanted.items() if self._surely_has(*pair, due)} - named
        if asked.operation == "CANCEL":  # of an entry with several messages all must match
            missing = {pair for pair in missing if pair[0].endswith(":-1")}
        require(not missing, f"{asked} does not name {sorted(missing)[:3]}")
        what = "waits" if wanted is cancelled else "is cancelled"
        for wrong, why in ((named & before.over, "was delivered"), (named & others.keys(), what)):
            require(not wrong, f"{asked} names {sorted(wrong)[:3]}, which {why}")
        for position, name in sorted(named):
            what = f"{asked} names {position} of {name}"
            require(position in world.oracle.expected, f"{what}, which nobody has sent")
            require(name == asked.subscription, what)
            key = world.oracle.expected[position].key
            require(asked.key in ("", key), f"{what}, which has the key {key}")
            due = wanted.get((position, name))
            is_right = due is None or not self._is_exact(name, due) or asked.has(due)
            require(is_right, f"{what}, which is due at {due}")

    def _surely_has(self, position: str, name: str, due: int) -> bool:
        """Whether something that is to be changed matches."""
        asked = self._asked
        if name != asked.subscription or asked.key not in ("", self._world.oracle.expected[position].key):
            return False
        # Without an end of the span it does not matter whether it is later than that.
        is_exact = self._is_exact(name, due) or (not asked.until and asked.operation != "RESTORE")
        return is_exact and asked.has(due)

    def _is_exact(self, name: str, due: int) -> bool:
        """Whether something is due then for certain: neither a rate, nor windows, nor a pause have put it off."""
        accounts = self._world.oracle.accounts
        return not accounts.is_shaped(name) and due > self._world.oracle.now() + accounts.dispatched_millis

    def _named(self, command: ControlCommand) -> Iterator[Pair]:
        """Yields what a command names, each message of an entry that it names whole."""
        positions = self._world.oracle.accounts.positions_of
        for entry, index in named_by(command):
            found = [one for one in positions(entry) if index < 0 or one.endswith(f":{index}")]
            found = found or [f"{entry}:-1:{index}"]  # nobody has sent it
            yield from ((position, name) for position in found for name in command.subscriptions)


def named_by(command: ControlCommand) -> list[tuple[str, int]]:
    """Returns (entry, batch index) of what a command names; -1: the whole entry."""
    kind = command.WhichOneof("operation")
    if kind in ("cancel", "cancels"):
        cancels = [command.cancel] if kind == "cancel" else command.cancels.messages
        return [(f"{one.ledger_id}:{one.entry_id}", -1) for one in cancels]
    entries = getattr(command, kind).entries
    return [(f"{one.ledger_id}:{one.entry_id}", index) for one in entries for index in one.batch_indexes or [-1]]


def filter_names(world: World) -> dict[Any, dict[str, Any]]:
    """What stands in for brokers, and for the way of commands to the job."""

    class Control:
        """Stands in for `ControlClient`: publishes the commands as that does, and waits for no answer."""

        def __init__(self, settings: Settings, issued_by: str) -> None:
            self._settings = settings

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, topic: str, calls: Iterable[Call], timeout_seconds: float) -> Iterator[Any]:
            change = world.rebuild_of()
            assert isinstance(change, FilteredChange)
            made = requests(self._settings, "operator", topic, calls)
            commands = [ControlCommand.FromString(one.command.SerializeToString()) for one in made]
            change.made(commands)
            for command in commands:
                world.point("filter: before a command is sent")
                world.filters.send(command)
            return iter(())

    return {
        admin.control.bulk: {"uuid": SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=world.filters.new_id()))},
        delaylake.control: {"time": STAND_INS[time]},
        admin.control.client: {"ControlClient": Control},
        warehouse.delta.snapshot: {"open_table": partial(open_live, world)},
        warehouse.queries.unsealed_messages: {
            "Brokers": lambda *_: world.new_brokers(),
            "AdminClient": lambda *_: Admin(world.cluster),
        },
    }
