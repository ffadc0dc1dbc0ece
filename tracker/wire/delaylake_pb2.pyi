from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Result(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESULT_UNSPECIFIED: _ClassVar[Result]
    APPLIED: _ClassVar[Result]
    ALREADY_APPLIED: _ClassVar[Result]
    TOO_LATE: _ClassVar[Result]
    WAITING: _ClassVar[Result]
    NOT_FOUND: _ClassVar[Result]
    NOT_ALLOWED: _ClassVar[Result]
    INVALID: _ClassVar[Result]
    SUPERSEDED: _ClassVar[Result]
    EXPIRED: _ClassVar[Result]
RESULT_UNSPECIFIED: Result
APPLIED: Result
ALREADY_APPLIED: Result
TOO_LATE: Result
WAITING: Result
NOT_FOUND: Result
NOT_ALLOWED: Result
INVALID: Result
SUPERSEDED: Result
EXPIRED: Result

class ControlCommand(_message.Message):
    __slots__ = ("request_id", "topic", "subscriptions", "issued_at", "issued_by", "sum_up", "cancel", "skip", "reschedule", "restore", "pause", "resume", "cancels", "retry", "skip_next", "pause_schedule", "resume_schedule", "postpone")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    ISSUED_BY_FIELD_NUMBER: _ClassVar[int]
    SUM_UP_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    RESCHEDULE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    SKIP_NEXT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    RESUME_SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    POSTPONE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    topic: str
    subscriptions: _containers.RepeatedScalarFieldContainer[str]
    issued_at: int
    issued_by: str
    sum_up: bool
    cancel: CancelDelayedMessage
    skip: SkipMessages
    reschedule: RescheduleMessages
    restore: RestoreMessages
    pause: PauseSubscriptions
    resume: ResumeSubscriptions
    cancels: CancelDelayedMessages
    retry: RetryMessage
    skip_next: SkipNext
    pause_schedule: PauseSchedules
    resume_schedule: ResumeSchedules
    postpone: PostponeMessages
    def __init__(self, request_id: _Optional[str] = ..., topic: _Optional[str] = ..., subscriptions: _Optional[_Iterable[str]] = ..., issued_at: _Optional[int] = ..., issued_by: _Optional[str] = ..., sum_up: _Optional[bool] = ..., cancel: _Optional[_Union[CancelDelayedMessage, _Mapping]] = ..., skip: _Optional[_Union[SkipMessages, _Mapping]] = ..., reschedule: _Optional[_Union[RescheduleMessages, _Mapping]] = ..., restore: _Optional[_Union[RestoreMessages, _Mapping]] = ..., pause: _Optional[_Union[PauseSubscriptions, _Mapping]] = ..., resume: _Optional[_Union[ResumeSubscriptions, _Mapping]] = ..., cancels: _Optional[_Union[CancelDelayedMessages, _Mapping]] = ..., retry: _Optional[_Union[RetryMessage, _Mapping]] = ..., skip_next: _Optional[_Union[SkipNext, _Mapping]] = ..., pause_schedule: _Optional[_Union[PauseSchedules, _Mapping]] = ..., resume_schedule: _Optional[_Union[ResumeSchedules, _Mapping]] = ..., postpone: _Optional[_Union[PostponeMessages, _Mapping]] = ...) -> None: ...

class CancelDelayedMessage(_message.Message):
    __slots__ = ("ledger_id", "entry_id", "deliver_at", "schedule_key")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_KEY_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    deliver_at: int
    schedule_key: str
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., deliver_at: _Optional[int] = ..., schedule_key: _Optional[str] = ...) -> None: ...

class CancelDelayedMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[CancelDelayedMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[CancelDelayedMessage, _Mapping]]] = ...) -> None: ...

class SkipMessages(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[SkipEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[SkipEntry, _Mapping]]] = ...) -> None: ...

class RescheduleMessages(_message.Message):
    __slots__ = ("entries", "deliver_at")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[SkipEntry]
    deliver_at: int
    def __init__(self, entries: _Optional[_Iterable[_Union[SkipEntry, _Mapping]]] = ..., deliver_at: _Optional[int] = ...) -> None: ...

class PostponeMessages(_message.Message):
    __slots__ = ("entries", "by_millis")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BY_MILLIS_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[SkipEntry]
    by_millis: int
    def __init__(self, entries: _Optional[_Iterable[_Union[SkipEntry, _Mapping]]] = ..., by_millis: _Optional[int] = ...) -> None: ...

class RestoreMessages(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[SkipEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[SkipEntry, _Mapping]]] = ...) -> None: ...

class RetryMessage(_message.Message):
    __slots__ = ("entry", "reason", "after_millis")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AFTER_MILLIS_FIELD_NUMBER: _ClassVar[int]
    entry: SkipEntry
    reason: str
    after_millis: int
    def __init__(self, entry: _Optional[_Union[SkipEntry, _Mapping]] = ..., reason: _Optional[str] = ..., after_millis: _Optional[int] = ...) -> None: ...

class SkipNext(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[SkipEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[SkipEntry, _Mapping]]] = ...) -> None: ...

class PauseSchedules(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[SkipEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[SkipEntry, _Mapping]]] = ...) -> None: ...

class ResumeSchedules(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[SkipEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[SkipEntry, _Mapping]]] = ...) -> None: ...

class PauseSubscriptions(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeSubscriptions(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SkipEntry(_message.Message):
    __slots__ = ("ledger_id", "entry_id", "batch_indexes", "partition", "deliver_at", "schedule_key")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_INDEXES_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_KEY_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    batch_indexes: _containers.RepeatedScalarFieldContainer[int]
    partition: int
    deliver_at: int
    schedule_key: str
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., batch_indexes: _Optional[_Iterable[int]] = ..., partition: _Optional[int] = ..., deliver_at: _Optional[int] = ..., schedule_key: _Optional[str] = ...) -> None: ...

class ControlOutcome(_message.Message):
    __slots__ = ("request_id", "topic", "subscription", "ledger_id", "entry_id", "batch_index", "result", "reason", "applied_at", "operation", "has_more", "n_named", "superseded_by", "schedule_key", "occurrence", "is_repeat", "deliver_at")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    APPLIED_AT_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    N_NAMED_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_BY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_KEY_FIELD_NUMBER: _ClassVar[int]
    OCCURRENCE_FIELD_NUMBER: _ClassVar[int]
    IS_REPEAT_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    topic: str
    subscription: str
    ledger_id: int
    entry_id: int
    batch_index: int
    result: Result
    reason: str
    applied_at: int
    operation: str
    has_more: bool
    n_named: int
    superseded_by: str
    schedule_key: str
    occurrence: int
    is_repeat: bool
    deliver_at: int
    def __init__(self, request_id: _Optional[str] = ..., topic: _Optional[str] = ..., subscription: _Optional[str] = ..., ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., batch_index: _Optional[int] = ..., result: _Optional[_Union[Result, str]] = ..., reason: _Optional[str] = ..., applied_at: _Optional[int] = ..., operation: _Optional[str] = ..., has_more: _Optional[bool] = ..., n_named: _Optional[int] = ..., superseded_by: _Optional[str] = ..., schedule_key: _Optional[str] = ..., occurrence: _Optional[int] = ..., is_repeat: _Optional[bool] = ..., deliver_at: _Optional[int] = ...) -> None: ...
