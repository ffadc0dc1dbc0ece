"""The kinds of control commands: the operations that they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Kinds of commands: the names of the operations in ControlCommand.
CANCEL = "cancel"
SKIP = "skip"
RESCHEDULE = "reschedule"
POSTPONE = "postpone"
RESTORE = "restore"
RETRY = "retry"
SKIP_NEXT = "skip_next"
PAUSE_SCHEDULE = "pause_schedule"
RESUME_SCHEDULE = "resume_schedule"
PAUSE = "pause"
RESUME = "resume"
ANSWER = "answer"  # nothing to apply: the row's result is only published
REPEAT = "repeat"  # the request id came before in the same batch: the first answer is only published again


class Effect(StrEnum):
    """What an applied command does to what is pending, as the column `effect` of `outcomes` has it.

    With an `occurrence` it does so to that occurrence of a recurring message alone.
    """

    CANCEL = "CANCEL"  # the message is not delivered
    RESTORE = "RESTORE"  # a cancelled message waits again, or with an `attempt` a delivered one once more
    MOVE = "MOVE"  # the message waits until another time
    HOLD = "HOLD"  # the schedule, or without an occurrence the subscription, is paused
    RESUME = "RESUME"  # it is not paused any more


@dataclass(frozen=True)
class Operation:
    """What an operation is, for the tracker, the tables, the admin API, and those who send commands.

    Attributes:
        kind: name of its field in ControlCommand; in capitals its name in outcomes.
        path: last part of its path in the admin API.
        effect: of an applied command.
        done: what was done to its message, for people.
        may_wait: a command by id that comes before its message waits for it, and is done.
        wants_payload: needs the payload rows of the messages that it names.
        is_of_schedule: is for recurring messages alone, whose next occurrence later subscriptions do not have.
        is_of_subscription: is for all that subscriptions get, and names no message.
        names_one: a command names one message.
    """

    kind: str
    path: str
    effect: Effect
    done: str
    may_wait: bool = False
    wants_payload: bool = False
    is_of_schedule: bool = False
    is_of_subscription: bool = False
    names_one: bool = False

    @property
    def is_of_topic(self) -> bool:
        """Whether it is for a whole topic, whichever of its partitions a command names."""
        return self.is_of_schedule or self.is_of_subscription


OPERATIONS = {
    operation.kind: operation
    for operation in (
        Operation(CANCEL, "cancelDelayedMessage", Effect.CANCEL, "cancelled", may_wait=True),
        Operation(SKIP, "skipByMessageIds", Effect.CANCEL, "skipped"),
        Operation(RESCHEDULE, "reschedule", Effect.MOVE, "rescheduled", wants_payload=True),
        Operation(POSTPONE, "postpone", Effect.MOVE, "postponed", wants_payload=True),
        Operation(RESTORE, "restore", Effect.RESTORE, "restored", wants_payload=True),
        Operation(RETRY, "retry", Effect.RESTORE, "retried", wants_payload=True, names_one=True),
        Operation(
            SKIP_NEXT, "skipNext", Effect.CANCEL, "next occurrence skipped", wants_payload=True, is_of_schedule=True
        ),
        Operation(PAUSE_SCHEDULE, "pause", Effect.HOLD, "schedule paused", wants_payload=True, is_of_schedule=True),
        Operation(
            RESUME_SCHEDULE, "resume", Effect.RESUME, "schedule resumed", wants_payload=True, is_of_schedule=True
        ),
        Operation(PAUSE, "pause", Effect.HOLD, "paused", is_of_subscription=True),
        Operation(RESUME, "resume", Effect.RESUME, "resumed", is_of_subscription=True),
    )
}
SCHEDULE_KINDS = tuple(one.kind for one in OPERATIONS.values() if one.is_of_schedule)
KINDS_WITH_PAYLOAD = tuple(one.kind for one in OPERATIONS.values() if one.wants_payload)
