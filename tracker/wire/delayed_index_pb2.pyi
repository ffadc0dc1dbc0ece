from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DelayedOperationType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELAY: _ClassVar[DelayedOperationType]
    CANCEL: _ClassVar[DelayedOperationType]
DELAY: DelayedOperationType
CANCEL: DelayedOperationType

class DelayedIndex(_message.Message):
    __slots__ = ("timestamp", "ledger_id", "entry_id", "delayed_operation_type")
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    DELAYED_OPERATION_TYPE_FIELD_NUMBER: _ClassVar[int]
    timestamp: int
    ledger_id: int
    entry_id: int
    delayed_operation_type: DelayedOperationType
    def __init__(self, timestamp: _Optional[int] = ..., ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., delayed_operation_type: _Optional[_Union[DelayedOperationType, str]] = ...) -> None: ...
