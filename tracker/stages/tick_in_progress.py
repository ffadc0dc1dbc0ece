"""A tick that is being applied to a shard."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from tracker.commands.holding.giving_up import GivenUp, GivingUp
from tracker.commands.moment import Moment
from tracker.tick import Effects, Tick, TickInput


@dataclass(kw_only=True)
class TickInProgress:
    """A tick that is being applied to a shard, and what has come of it so far."""

    tick: Tick
    input: TickInput
    moment: Moment
    giving_up: GivingUp
    ends_seal_epoch: bool
    commands: pa.Table  # as COMMAND_ROWS, with those that came with messages, and the messages that keys stand for
    effects: Effects = field(default_factory=Effects)
    outcomes: list[pa.Table] = field(default_factory=list)  # as OUTCOME_ROWS, but for those of `given_up`
    given_up: list[GivenUp] = field(default_factory=list)
    n_taken: int = 0  # new messages
    n_left_out: int = 0  # rejected messages that go nowhere, not to the rejects topic either
    n_short_notice: int = 0  # rows released that were due when they came, or were moved to now
    n_planned: int = 0  # rows released that waited in the tracker
