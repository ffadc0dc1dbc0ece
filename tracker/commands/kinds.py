"""The kinds of control commands: the operations that they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from tracker.due_time import MAX_TIME_MILLIS
from tracker.properties import MAX_AFTER_MILLIS, MAX_REASON

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
class Field:
    """What an operation's message in ControlCommand has beside the messages that it names.

    Attributes:
        name: of the field; in camel case in the admin API's bodies.
        text: what it says.
        example: for the admin API's description.
        column: of COMMAND_ROWS that has its value; "": that of its name.
        least, most: the limits of a number, inclusive. Of a text `most` characters are kept.
        is_text: it is a text, and no number.
        is_optional: it may be missing in a body, and is 0 or "" then.
        may_be_0: whether a number may be 0.
        option: the command line's option; "": it has none of its own.
        unit: of a number: `moment` (ms since the epoch), `delay` (ms from now), `shift` (ms later, or if it is negative
            sooner, than each message is due); "": none of these, or a text.
    """

    name: str
    text: str
    example: int | str
    column: str = ""
    least: int = 0
    most: int = MAX_TIME_MILLIS - 1
    is_text: bool = False
    is_optional: bool = False
    may_be_0: bool = True
    option: str = ""
    unit: str = ""

    def allows(self, number: int) -> bool:
        """Whether a number is within the limits."""
        return self.least <= number <= self.most and (number != 0 or self.may_be_0)


@dataclass(frozen=True)
class Operation:
    """What an operation is: for the tracker, the tables, the admin API, the command line, and their docs.

    An operation with a summary has a route of the admin API that is made of this description; the older ones', which
    have Pulsar's paths and bodies, are written by hand. One with a `command` has a command of the command line so, too.

    Attributes:
        kind: name of its field in ControlCommand; in capitals its name in outcomes.
        path: last part of its path in the admin API.
        effect: of an applied command.
        done: what was done to its message, for people.
        may_wait: a command by id that comes before its message waits for it, and is done.
        wants_payload: needs the payload rows of the messages that it names.
        is_of_schedule: is for recurring messages alone, whose next occurrence later subscriptions do not have.
        is_of_subscription: is for all that subscriptions get, and names no message.
        names_one: a command names one message, by its id, for one subscription.
        adds_up: each command has an effect of its own on the same message.
        needs_single_acks: is not for subscriptions that acknowledge cumulatively.
        by_key: may name messages by their schedule keys.
        by_filter: may be for all messages that match a filter.
        fields: what a command says beside the messages.
        right: what a role needs to ask for it, as in the settings.
        summary, text: what the admin API's description says of it.
        command: the help of its command of the command line.
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
    adds_up: bool = False
    needs_single_acks: bool = False
    by_key: bool = False
    by_filter: bool = False
    fields: tuple[Field, ...] = ()
    right: str = ""
    summary: str = ""
    text: str = ""
    command: str = ""

    @property
    def is_of_topic(self) -> bool:
        """Whether it is for a whole topic, whichever of its partitions a command names."""
        return self.is_of_schedule or self.is_of_subscription

    @cached_property
    def cancels_message(self) -> bool:
        """Whether an applied command cancels the message itself, and not an occurrence of it."""
        return self.effect is Effect.CANCEL and not self.wants_payload

    @cached_property
    def time_field(self) -> Field | None:
        """The field of which COMMAND_ROWS.deliver_at has the value."""
        return next((field for field in self.fields if (field.column or field.name) == "deliver_at"), None)

    @cached_property
    def other_fields(self) -> tuple[Field, ...]:
        """The fields without `time_field`."""
        return tuple(field for field in self.fields if field is not self.time_field)

    @cached_property
    def names_time(self) -> bool:
        """Whether a command's `deliver_at` is part of what it asks for: a skip's only helps to find the message."""
        return self.may_wait or self.time_field is not None


OPERATIONS = {
    operation.kind: operation
    for operation in (
        Operation(
            CANCEL, "cancelDelayedMessage", Effect.CANCEL, "cancelled", may_wait=True, by_key=True, by_filter=True
        ),
        Operation(
            SKIP,
            "skipByMessageIds",
            Effect.CANCEL,
            "skipped",
            needs_single_acks=True,
            by_key=True,
            by_filter=True,
            command="Skip messages that wait, by their ids: whole entries, or single messages of a batch.\n\nIt is"
            " TOO_LATE for messages that are dispatched already, which is some seconds before they are due, and at once"
            " if they are due when they come. To have time, pause the subscription first.\n\nWith --from-file each line"
            " is a triplet, an id that `delaylake produce` printed, or base64.",
        ),
        Operation(
            RESCHEDULE,
            "reschedule",
            Effect.MOVE,
            "rescheduled",
            wants_payload=True,
            by_key=True,
            by_filter=True,
            fields=(Field("deliver_at", "When, ms since the epoch.", example=1_795_251_600_000, unit="moment"),),
            right="deliver",
            summary="Deliver messages at another time",
            text="Delivers messages that wait for the subscription at another time, earlier or later; at once, if that"
            " is past. They keep their ids. Cancelled or skipped messages have to be restored first.",
        ),
        Operation(
            POSTPONE,
            "postpone",
            Effect.MOVE,
            "postponed",
            wants_payload=True,
            adds_up=True,
            by_key=True,
            by_filter=True,
            fields=(
                Field(
                    "by_millis",
                    "How much later: 10s, 30m, 2h, 1d; -30m: sooner.",
                    example=1_800_000,
                    column="deliver_at",
                    least=1 - MAX_TIME_MILLIS,
                    may_be_0=False,
                    option="--by",
                    unit="shift",
                ),
            ),
            right="deliver",
            summary="Deliver messages later",
            text="Delivers messages that wait for the subscription so much later than each would be, or sooner with a"
            " negative `byMillis`, but not before now. A message that is parked counts from the time at which it"
            " came due. Of a recurring message it is the next occurrence alone. Each call adds up.",
            command="Deliver messages so much later than each would be: those named, or those to which all options"
            " given apply.\n\nWith a negative --by they come sooner, but not before now. Of a recurring message it is"
            " the next occurrence alone.",
        ),
        Operation(
            RESTORE,
            "restore",
            Effect.RESTORE,
            "restored",
            wants_payload=True,
            by_filter=True,
            right="cancel",
            summary="Undo cancels and skips",
            text="Undoes a cancel or skip of messages whose time has not come: they are delivered at their time.",
            command="Undo cancels and skips of messages that are not due yet.",
        ),
        Operation(
            RETRY,
            "retry",
            Effect.RESTORE,
            "retried",
            wants_payload=True,
            names_one=True,
            fields=(
                Field(
                    "reason",
                    "Why it failed, for the attempts and the dead letters.",
                    example="the shop is closed",
                    most=MAX_REASON,
                    is_text=True,
                    is_optional=True,
                    option="--reason",
                ),
                Field(
                    "after_millis",
                    "How long from now: 10s, 5m. Default: by the backoff.",
                    example=60_000,
                    most=MAX_AFTER_MILLIS,
                    is_optional=True,
                    option="--after",
                    unit="delay",
                ),
            ),
            right="deliver",
            summary="Deliver messages once more",
            text="Delivers messages once more to the subscription, the one (not `*`) whose consumer failed on them:"
            " after `afterMillis`, or as the subscription's backoff says, and with the property `delaylake.attempt`. A"
            " message that has had all its retries goes to the topic of dead letters, `<destination>-dlq`, with the"
            " reasons. The result for a message that still waits is ALREADY_APPLIED.",
            command="Deliver messages once more that a consumer of the subscription failed on.\n\nAfter all retries"
            " that the subscription's backoff allows, the next one goes to the topic <destination>-dlq.",
        ),
        Operation(
            SKIP_NEXT,
            "skipNext",
            Effect.CANCEL,
            "next occurrence skipped",
            wants_payload=True,
            adds_up=True,
            is_of_schedule=True,
            by_key=True,
            right="skip",
            summary="Skip the next occurrence of",
            text="Skips the next occurrence of a schedule, on all subscriptions or those named; on each it is the one"
            " that waits there.",
            command="Skip the next occurrence of a schedule.",
        ),
        Operation(
            PAUSE_SCHEDULE,
            "pause",
            Effect.HOLD,
            "schedule paused",
            wants_payload=True,
            is_of_schedule=True,
            by_key=True,
            right="skip",
            summary="Pause",
            text="Pauses a schedule, on all subscriptions or those named: its next occurrence waits until the schedule"
            " is resumed. An occurrence that is dispatched already is delivered. An occurrence that was rescheduled"
            " gets its time by the rule back. Pausing a paused schedule does nothing.",
            command="Pause a schedule: its next occurrence waits until `resume`.\n\nAn occurrence that is dispatched"
            " already is delivered.",
        ),
        Operation(
            RESUME_SCHEDULE,
            "resume",
            Effect.RESUME,
            "schedule resumed",
            wants_payload=True,
            is_of_schedule=True,
            by_key=True,
            right="skip",
            summary="Resume",
            text="Resumes a paused schedule, on all subscriptions or those named: it goes on by its rule. Missed"
            " occurrences are made up for as its `misfire` says. A schedule that is not paused stays as it is.",
            command="Resume a paused schedule: it goes on by its rule.\n\nMissed occurrences are made up for as its"
            " misfire says: once (late), all, or skip.",
        ),
        Operation(
            PAUSE,
            "pause",
            Effect.HOLD,
            "paused",
            is_of_subscription=True,
            right="admin",
            summary="Park what comes due",
            text="Messages that come due for the subscription are parked from now on, until they are rescheduled or"
            " delivered now, or the pause ends. Messages that were dispatched already are delivered.",
            command="Park messages that come due for a subscription, until it is resumed, or they are rescheduled.",
        ),
        Operation(
            RESUME,
            "resume",
            Effect.RESUME,
            "resumed",
            is_of_subscription=True,
            right="admin",
            summary="End a pause",
            text="Messages that were parked are delivered now, those that were due first in the first batch, up to"
            " 10,000 messages or 16 MiB in each, and those that come due from now on at their time.",
            command="End a pause: messages that were parked are delivered now.",
        ),
    )
}
KINDS_WITH_PAYLOAD = tuple(one.kind for one in OPERATIONS.values() if one.wants_payload)
CANCELLING_KINDS = tuple(one.kind for one in OPERATIONS.values() if one.cancels_message)
SINGLE_ACK_KINDS = tuple(one.kind for one in OPERATIONS.values() if one.needs_single_acks)
