"""The kinds of control commands: the operations that they ask for."""

from __future__ import annotations

from dataclasses import dataclass

# Kinds of commands: the names of the operations in ControlCommand.
CANCEL = "cancel"
SKIP = "skip"
RESCHEDULE = "reschedule"
RESTORE = "restore"
RETRY = "retry"
SKIP_NEXT = "skip_next"
PAUSE_SCHEDULE = "pause_schedule"
RESUME_SCHEDULE = "resume_schedule"
PAUSE = "pause"
RESUME = "resume"
ANSWER = "answer"  # nothing to apply: the row's result is only published
REPEAT = "repeat"  # the request id came before in the same batch: the first answer is only published again


@dataclass(frozen=True)
class Operation:
    """What an operation is, for the tracker, the admin API, and those who send commands.

    Attributes:
        kind: name of its field in ControlCommand; in capitals its name in outcomes.
        path: last part of its path in the admin API.
        may_wait: a command by id that comes before its message waits for it, and is done.
        wants_payload: needs the payload rows of the messages that it names.
        is_of_schedule: changes the next occurrence of recurring messages, which later subscriptions do not have.
        is_of_subscription: is for all that subscriptions get, and names no message.
        names_one: a command names one message.
    """

    kind: str
    path: str
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
        Operation(CANCEL, "cancelDelayedMessage", may_wait=True),
        Operation(SKIP, "skipByMessageIds"),
        Operation(RESCHEDULE, "reschedule", wants_payload=True),
        Operation(RESTORE, "restore", wants_payload=True),
        Operation(RETRY, "retry", wants_payload=True, names_one=True),
        Operation(SKIP_NEXT, "skipNext", wants_payload=True, is_of_schedule=True),
        Operation(PAUSE_SCHEDULE, "pause", wants_payload=True, is_of_schedule=True),
        Operation(RESUME_SCHEDULE, "resume", wants_payload=True, is_of_schedule=True),
        Operation(PAUSE, "pause", is_of_subscription=True),
        Operation(RESUME, "resume", is_of_subscription=True),
    )
}
SCHEDULE_KINDS = tuple(one.kind for one in OPERATIONS.values() if one.is_of_schedule)
KINDS_WITH_PAYLOAD = tuple(one.kind for one in OPERATIONS.values() if one.wants_payload)
