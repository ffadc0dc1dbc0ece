from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SingleMessageMetadata(_message.Message):
    __slots__ = ("payload_size", "partition_key_b64_encoded")
    PAYLOAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_KEY_B64_ENCODED_FIELD_NUMBER: _ClassVar[int]
    payload_size: int
    partition_key_b64_encoded: bool
    def __init__(self, payload_size: _Optional[int] = ..., partition_key_b64_encoded: _Optional[bool] = ...) -> None: ...
