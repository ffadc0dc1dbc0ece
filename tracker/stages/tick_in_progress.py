"""The state of a tick while a shard applies it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from tracker.commands.holding.giving_up import GivenUp, GivingUp
from tracker.commands.moment import Moment
from tracker.tick import Effects, Tick, TickInput


@dataclass(kw_only=True)
class TickInProgress:
    """A tick that a shard is applying, and its effects so far."""

    tick: Tick
    input: TickInput
    moment: Moment
    giving_up: GivingUp
    ends_seal_epoch: bool
    commands: pa.Table  # as COMMAND_ROWS: the input's and those of messages sent back, with schedule keys resolved
    effects: Effects = field(default_factory=Effects)
    outcomes: list[pa.Table] = field(default_factory=list)  # as OUTCOME_ROWS, without those of `given_up`
    given_up: list[GivenUp] = field(default_factory=list)
    n_taken: int = 0  # messages that came in
    n_left_out: int = 0  # messages that are left out: another cluster's job delivers them
    n_short_notice: int = 0  # released rows that were due when they came in, or were moved to now
    n_planned: int = 0  # released rows that waited in the tracker
