"""Audits in a simulation: the real code, on real Delta tables that are made of those in memory.

An audit opens one table after the other, and the job goes on meanwhile. Each table is as it is when it is opened.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import warehouse.audit.broker_comparison
import warehouse.delta.opening
from tests.simulation.accounts import BrokenGuaranteeError, require
from tests.simulation.added import ADDED
from tests.simulation.broker import Admin
from tests.simulation.expected import entry_of
from tests.simulation.importing import is_imported
from tests.simulation.live_tables import LiveTables, open_live
from tests.simulation.parcels import TOPIC as CHANGED
from tests.simulation.retaining import of_copy
from tests.simulation.scheduler import Process
from warehouse.audit.accounts import OVERDUE_MILLIS, Audit, run_audit

if TYPE_CHECKING:
    from tests.simulation.world import World

_EVERY_SECONDS = (8.0, 30.0)


def check_nothing_waits(found: Audit, lost: Counter[str]) -> None:
    """Nothing waits any more, and so an audit says, but for a subscription that comes and goes.

    What that got when it was taken out may never be recorded.

    Args:
        found: the audit.
        lost: by subscription how many messages were lost with their broker, of which others had a row.
    """
    overdue = found.findings.get("overdue", {"examples": []})["examples"]
    n_overdue = Counter(one["subscription"] for one in overdue)
    waiting = [one for one in overdue if n_overdue[one["subscription"]] > lost[one["subscription"]]]
    waiting += [row for row in found.counts if row["pending"] > lost[row["subscription"]]]
    waiting = [one for one in waiting if one["subscription"] != ADDED]
    require(not waiting, f"nothing waits, and an audit has {waiting[:3]}")


class AuditRun:
    """One audit, as an operator runs it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.copy = LiveTables(world)
        for name in world.logs:
            self.copy.bring(name, at_once=True)

    def run(self) -> Audit:
        """Audits, and checks that the audit finds what waits too long, and nothing else."""
        oracle = self._world.oracle
        recorded, now = oracle.recorded.copy(), oracle.last_delivery
        waited = self._waiting_too_long(now)
        found = run_audit(of_copy(self._world.settings, self.copy))
        overdue = found.findings.get("overdue", {"count": 0, "examples": []})
        for kind, finding in found.findings.items():
            if kind == "overdue":
                continue
            # What had come, or was on its way, when a subscription was taken out may come again (docs/guarantees.md).
            is_of_added = all(one["subscription"] == ADDED for one in finding["examples"])
            is_right = is_of_added and kind in ("doubled", "delivered_although_cancelled")
            # What admins take out of a source topic is named (`parcels.py`).
            is_right |= kind == "not_seen" and all(one["topic"] == CHANGED for one in finding["examples"])
            require(is_right, f"an audit finds {kind}: {finding}")
        listed = {(one["position"], one["subscription"]) for one in overdue["examples"]}
        wrong = {one for one in listed if recorded[one] and not oracle.may_come_again(*one)}
        require(not wrong, f"an audit has {sorted(wrong)[:3]} overdue, which were delivered")
        plain = {one for route in self._world.settings.routes for one in oracle.wanted(route.source)}
        soon = {
            one for one in listed & plain if oracle.accounts.accounts[one].due > oracle.last_delivery - OVERDUE_MILLIS
        }
        require(not soon, f"an audit has {sorted(soon)[:3]} overdue, which are not yet")
        missing = waited & self._waiting_too_long(now) - listed
        is_whole = overdue["count"] == len(listed)
        require(not missing or not is_whole, f"an audit does not have {sorted(missing)[:3]} overdue")
        return found

    def _waiting_too_long(self, now: int) -> set[tuple[str, str]]:
        """The plain messages of which no delivery is recorded a minute and more after they were due, by a time."""
        oracle = self._world.oracle
        return {
            one
            for route in self._world.settings.routes
            for one in oracle.wanted(route.source)
            if oracle.is_sealed(*one)
            and entry_of(one[0]) in oracle.durable["entries"]  # with which the audit begins
            and not oracle.recorded[one]
            and one not in oracle.parked
            and not oracle.accounts.is_shaped(one[1])  # those have times of their own while they wait
            and oracle.accounts.accounts[one].due < now - OVERDUE_MILLIS
        }

    def check_counts(self, found: Audit) -> None:
        """Nothing waits any more: nor does the audit have anything that does, and it has all else that there is."""
        oracle = self._world.oracle
        check_nothing_waits(found, oracle.lost_for)
        n_not_seen, n_named = found.findings.get("not_seen", {"count": 0})["count"], oracle.parcels.n_named
        require(n_not_seen >= n_named, f"the audit has {n_not_seen} entries not seen, and {n_named} are named")
        if self._world.backups.n_restored:  # some accounts are unsure, and have other ids with another broker
            return
        delivered: Counter[str] = Counter()
        for (_, name), account in oracle.accounts.accounts.items():
            delivered[name] += not account.is_gone
        for position, name in oracle.came:
            delivered[name] += oracle.schedules.has(position) or is_imported(position)
        for row in found.counts:
            name = row["subscription"]
            if name != ADDED and row["topic"] != CHANGED:  # of which some messages are lost, and named
                is_right = row["delivered"] == delivered[name]
                require(is_right, f"the audit has {row}, and not {delivered[name]} delivered")


class Audits:
    """Somebody audits now and then, in some of the seeds."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = random.Random(f"audits {world.plan.seed}")
        self.are_made = self._chance.random() < world.plan.rates.get("seeds with audits", 0.0)
        if self.are_made:
            self._later()

    def _later(self) -> None:
        self._world.scheduler.after(self._chance.uniform(*_EVERY_SECONDS), self._begin)

    def _begin(self) -> None:
        self._later()
        if not self._world.long_pause.is_now:
            self._start(is_last=False)

    def audit_at_end(self) -> None:
        """Audits when nothing waits any more."""
        if self.are_made:
            process = self._start(is_last=True)
            self._world.scheduler.run(lambda: process.is_dead)

    def _start(self, is_last: bool) -> Process:
        process = Process("audit", 0.0)
        self._world.trace("an audit starts")
        self._world.scheduler.start(process, "main", partial(self._run, process, is_last))
        return process

    def _run(self, process: Process, is_last: bool) -> None:
        world = self._world
        world.rebuilds[process] = audit = AuditRun(world)
        try:
            found = audit.run()
            if is_last:
                audit.check_counts(found)
            world.trace(f"the audit has {found.taken_in} messages, {found.counts}, {found.findings}")
        except BrokenGuaranteeError as error:
            world.break_off(str(error))
        finally:
            del world.rebuilds[process]
            audit.copy.remove()
        world.end(process)


def audit_names(world: World) -> dict[Any, dict[str, Any]]:
    """What stands in for the broker, and for the tables of an audit."""

    return {
        warehouse.delta.opening: {"open_table": partial(open_live, world)},
        warehouse.audit.broker_comparison: {
            "AdminClient": lambda *_: Admin(world.cluster),
            "Brokers": lambda _: world.new_brokers(),
        },
    }
