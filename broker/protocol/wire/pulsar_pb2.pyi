from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[Compression]
    LZ4: _ClassVar[Compression]
    ZLIB: _ClassVar[Compression]
    ZSTD: _ClassVar[Compression]
    SNAPPY: _ClassVar[Compression]

class ServerError(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UnknownError: _ClassVar[ServerError]
    MetadataError: _ClassVar[ServerError]
    PersistenceError: _ClassVar[ServerError]
    AuthenticationError: _ClassVar[ServerError]
    AuthorizationError: _ClassVar[ServerError]
    ConsumerBusy: _ClassVar[ServerError]
    ServiceNotReady: _ClassVar[ServerError]
    ProducerBlockedQuotaExceededError: _ClassVar[ServerError]
    ProducerBlockedQuotaExceededException: _ClassVar[ServerError]
    ChecksumError: _ClassVar[ServerError]
    UnsupportedVersionError: _ClassVar[ServerError]
    TopicNotFound: _ClassVar[ServerError]
    SubscriptionNotFound: _ClassVar[ServerError]
    ConsumerNotFound: _ClassVar[ServerError]
    TooManyRequests: _ClassVar[ServerError]
    TopicTerminatedError: _ClassVar[ServerError]
    ProducerBusy: _ClassVar[ServerError]
    InvalidTopicName: _ClassVar[ServerError]
    IncompatibleSchema: _ClassVar[ServerError]
    ConsumerAssignError: _ClassVar[ServerError]
    TransactionCoordinatorNotFound: _ClassVar[ServerError]
    InvalidTxnStatus: _ClassVar[ServerError]
    NotAllowedError: _ClassVar[ServerError]
    TransactionConflict: _ClassVar[ServerError]
    TransactionNotFound: _ClassVar[ServerError]
    ProducerFenced: _ClassVar[ServerError]
NONE: Compression
LZ4: Compression
ZLIB: Compression
ZSTD: Compression
SNAPPY: Compression
UnknownError: ServerError
MetadataError: ServerError
PersistenceError: ServerError
AuthenticationError: ServerError
AuthorizationError: ServerError
ConsumerBusy: ServerError
ServiceNotReady: ServerError
ProducerBlockedQuotaExceededError: ServerError
ProducerBlockedQuotaExceededException: ServerError
ChecksumError: ServerError
UnsupportedVersionError: ServerError
TopicNotFound: ServerError
SubscriptionNotFound: ServerError
ConsumerNotFound: ServerError
TooManyRequests: ServerError
TopicTerminatedError: ServerError
ProducerBusy: ServerError
InvalidTopicName: ServerError
IncompatibleSchema: ServerError
ConsumerAssignError: ServerError
TransactionCoordinatorNotFound: ServerError
InvalidTxnStatus: ServerError
NotAllowedError: ServerError
TransactionConflict: ServerError
TransactionNotFound: ServerError
ProducerFenced: ServerError

class Text(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    value: bytes
    def __init__(self, key: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...

class MessageId(_message.Message):
    __slots__ = ("ledger_id", "entry_id", "partition", "batch_index", "ack_set")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    ACK_SET_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    partition: int
    batch_index: int
    ack_set: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., partition: _Optional[int] = ..., batch_index: _Optional[int] = ..., ack_set: _Optional[_Iterable[int]] = ...) -> None: ...

class EncryptionKey(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    value: bytes
    def __init__(self, name: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...

class MessageMetadata(_message.Message):
    __slots__ = ("producer_name", "sequence_id", "publish_time", "properties", "replicated_from", "partition_key", "compression", "uncompressed_size", "n_messages", "event_time", "encryption_keys", "encryption_param", "schema_version", "is_key_base64", "ordering_key", "deliver_at_time", "marker_type", "txn_id_low", "txn_id_high", "highest_sequence_id", "is_null_value", "uuid", "n_chunks", "chunked_size", "chunk_id", "is_key_null")
    PRODUCER_NAME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_FROM_FIELD_NUMBER: _ClassVar[int]
    PARTITION_KEY_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    UNCOMPRESSED_SIZE_FIELD_NUMBER: _ClassVar[int]
    N_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTION_KEYS_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTION_PARAM_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_KEY_BASE64_FIELD_NUMBER: _ClassVar[int]
    ORDERING_KEY_FIELD_NUMBER: _ClassVar[int]
    DELIVER_AT_TIME_FIELD_NUMBER: _ClassVar[int]
    MARKER_TYPE_FIELD_NUMBER: _ClassVar[int]
    TXN_ID_LOW_FIELD_NUMBER: _ClassVar[int]
    TXN_ID_HIGH_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    IS_NULL_VALUE_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    N_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    IS_KEY_NULL_FIELD_NUMBER: _ClassVar[int]
    producer_name: bytes
    sequence_id: int
    publish_time: int
    properties: _containers.RepeatedCompositeFieldContainer[Text]
    replicated_from: bytes
    partition_key: bytes
    compression: int
    uncompressed_size: int
    n_messages: int
    event_time: int
    encryption_keys: _containers.RepeatedCompositeFieldContainer[EncryptionKey]
    encryption_param: bytes
    schema_version: bytes
    is_key_base64: bool
    ordering_key: bytes
    deliver_at_time: int
    marker_type: int
    txn_id_low: int
    txn_id_high: int
    highest_sequence_id: int
    is_null_value: bool
    uuid: bytes
    n_chunks: int
    chunked_size: int
    chunk_id: int
    is_key_null: bool
    def __init__(self, producer_name: _Optional[bytes] = ..., sequence_id: _Optional[int] = ..., publish_time: _Optional[int] = ..., properties: _Optional[_Iterable[_Union[Text, _Mapping]]] = ..., replicated_from: _Optional[bytes] = ..., partition_key: _Optional[bytes] = ..., compression: _Optional[int] = ..., uncompressed_size: _Optional[int] = ..., n_messages: _Optional[int] = ..., event_time: _Optional[int] = ..., encryption_keys: _Optional[_Iterable[_Union[EncryptionKey, _Mapping]]] = ..., encryption_param: _Optional[bytes] = ..., schema_version: _Optional[bytes] = ..., is_key_base64: _Optional[bool] = ..., ordering_key: _Optional[bytes] = ..., deliver_at_time: _Optional[int] = ..., marker_type: _Optional[int] = ..., txn_id_low: _Optional[int] = ..., txn_id_high: _Optional[int] = ..., highest_sequence_id: _Optional[int] = ..., is_null_value: _Optional[bool] = ..., uuid: _Optional[bytes] = ..., n_chunks: _Optional[int] = ..., chunked_size: _Optional[int] = ..., chunk_id: _Optional[int] = ..., is_key_null: _Optional[bool] = ...) -> None: ...

class BatchedMetadata(_message.Message):
    __slots__ = ("properties", "partition_key", "payload_size", "event_time", "is_key_base64", "ordering_key", "sequence_id", "is_null_value", "is_key_null")
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    PARTITION_KEY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_FIELD_NUMBER: _ClassVar[int]
    IS_KEY_BASE64_FIELD_NUMBER: _ClassVar[int]
    ORDERING_KEY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    IS_NULL_VALUE_FIELD_NUMBER: _ClassVar[int]
    IS_KEY_NULL_FIELD_NUMBER: _ClassVar[int]
    properties: _containers.RepeatedCompositeFieldContainer[Text]
    partition_key: bytes
    payload_size: int
    event_time: int
    is_key_base64: bool
    ordering_key: bytes
    sequence_id: int
    is_null_value: bool
    is_key_null: bool
    def __init__(self, properties: _Optional[_Iterable[_Union[Text, _Mapping]]] = ..., partition_key: _Optional[bytes] = ..., payload_size: _Optional[int] = ..., event_time: _Optional[int] = ..., is_key_base64: _Optional[bool] = ..., ordering_key: _Optional[bytes] = ..., sequence_id: _Optional[int] = ..., is_null_value: _Optional[bool] = ..., is_key_null: _Optional[bool] = ...) -> None: ...

class BrokerEntryMetadata(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: int
    def __init__(self, index: _Optional[int] = ...) -> None: ...

class FeatureFlags(_message.Message):
    __slots__ = ("supports_auth_refresh", "supports_broker_entry_metadata")
    SUPPORTS_AUTH_REFRESH_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_BROKER_ENTRY_METADATA_FIELD_NUMBER: _ClassVar[int]
    supports_auth_refresh: bool
    supports_broker_entry_metadata: bool
    def __init__(self, supports_auth_refresh: _Optional[bool] = ..., supports_broker_entry_metadata: _Optional[bool] = ...) -> None: ...

class Connect(_message.Message):
    __slots__ = ("client_version", "auth_data", "protocol_version", "auth_method_name", "proxy_to_broker_url", "feature_flags")
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    AUTH_DATA_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    AUTH_METHOD_NAME_FIELD_NUMBER: _ClassVar[int]
    PROXY_TO_BROKER_URL_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FLAGS_FIELD_NUMBER: _ClassVar[int]
    client_version: str
    auth_data: bytes
    protocol_version: int
    auth_method_name: str
    proxy_to_broker_url: str
    feature_flags: FeatureFlags
    def __init__(self, client_version: _Optional[str] = ..., auth_data: _Optional[bytes] = ..., protocol_version: _Optional[int] = ..., auth_method_name: _Optional[str] = ..., proxy_to_broker_url: _Optional[str] = ..., feature_flags: _Optional[_Union[FeatureFlags, _Mapping]] = ...) -> None: ...

class Connected(_message.Message):
    __slots__ = ("protocol_version", "max_message_size")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    max_message_size: int
    def __init__(self, protocol_version: _Optional[int] = ..., max_message_size: _Optional[int] = ...) -> None: ...

class AuthData(_message.Message):
    __slots__ = ("auth_method_name", "auth_data")
    AUTH_METHOD_NAME_FIELD_NUMBER: _ClassVar[int]
    AUTH_DATA_FIELD_NUMBER: _ClassVar[int]
    auth_method_name: str
    auth_data: bytes
    def __init__(self, auth_method_name: _Optional[str] = ..., auth_data: _Optional[bytes] = ...) -> None: ...

class AuthChallenge(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class AuthResponse(_message.Message):
    __slots__ = ("client_version", "response", "protocol_version")
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    client_version: str
    response: AuthData
    protocol_version: int
    def __init__(self, client_version: _Optional[str] = ..., response: _Optional[_Union[AuthData, _Mapping]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("topic", "request_id", "authoritative")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AUTHORITATIVE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    request_id: int
    authoritative: bool
    def __init__(self, topic: _Optional[str] = ..., request_id: _Optional[int] = ..., authoritative: _Optional[bool] = ...) -> None: ...

class LookupAnswer(_message.Message):
    __slots__ = ("broker_url", "broker_url_tls", "kind", "request_id", "authoritative", "error", "message", "through_service_url")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REDIRECT: _ClassVar[LookupAnswer.Kind]
        CONNECT: _ClassVar[LookupAnswer.Kind]
        FAILED: _ClassVar[LookupAnswer.Kind]
    REDIRECT: LookupAnswer.Kind
    CONNECT: LookupAnswer.Kind
    FAILED: LookupAnswer.Kind
    BROKER_URL_FIELD_NUMBER: _ClassVar[int]
    BROKER_URL_TLS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AUTHORITATIVE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    THROUGH_SERVICE_URL_FIELD_NUMBER: _ClassVar[int]
    broker_url: str
    broker_url_tls: str
    kind: LookupAnswer.Kind
    request_id: int
    authoritative: bool
    error: int
    message: bytes
    through_service_url: bool
    def __init__(self, broker_url: _Optional[str] = ..., broker_url_tls: _Optional[str] = ..., kind: _Optional[_Union[LookupAnswer.Kind, str]] = ..., request_id: _Optional[int] = ..., authoritative: _Optional[bool] = ..., error: _Optional[int] = ..., message: _Optional[bytes] = ..., through_service_url: _Optional[bool] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("topic", "subscription", "type", "consumer_id", "request_id", "durable", "start_message_id", "initial_position")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EXCLUSIVE: _ClassVar[Subscribe.Type]
        SHARED: _ClassVar[Subscribe.Type]
        FAILOVER: _ClassVar[Subscribe.Type]
        KEY_SHARED: _ClassVar[Subscribe.Type]
    EXCLUSIVE: Subscribe.Type
    SHARED: Subscribe.Type
    FAILOVER: Subscribe.Type
    KEY_SHARED: Subscribe.Type
    class InitialPosition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LATEST: _ClassVar[Subscribe.InitialPosition]
        EARLIEST: _ClassVar[Subscribe.InitialPosition]
    LATEST: Subscribe.InitialPosition
    EARLIEST: Subscribe.InitialPosition
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    START_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    INITIAL_POSITION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    type: Subscribe.Type
    consumer_id: int
    request_id: int
    durable: bool
    start_message_id: MessageId
    initial_position: Subscribe.InitialPosition
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., type: _Optional[_Union[Subscribe.Type, str]] = ..., consumer_id: _Optional[int] = ..., request_id: _Optional[int] = ..., durable: _Optional[bool] = ..., start_message_id: _Optional[_Union[MessageId, _Mapping]] = ..., initial_position: _Optional[_Union[Subscribe.InitialPosition, str]] = ...) -> None: ...

class Flow(_message.Message):
    __slots__ = ("consumer_id", "permits")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    PERMITS_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    permits: int
    def __init__(self, consumer_id: _Optional[int] = ..., permits: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("consumer_id", "id", "ack_set")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ACK_SET_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    id: MessageId
    ack_set: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, consumer_id: _Optional[int] = ..., id: _Optional[_Union[MessageId, _Mapping]] = ..., ack_set: _Optional[_Iterable[int]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("consumer_id", "type", "ids", "request_id")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INDIVIDUAL: _ClassVar[Ack.Type]
        CUMULATIVE: _ClassVar[Ack.Type]
    INDIVIDUAL: Ack.Type
    CUMULATIVE: Ack.Type
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    type: Ack.Type
    ids: _containers.RepeatedCompositeFieldContainer[MessageId]
    request_id: int
    def __init__(self, consumer_id: _Optional[int] = ..., type: _Optional[_Union[Ack.Type, str]] = ..., ids: _Optional[_Iterable[_Union[MessageId, _Mapping]]] = ..., request_id: _Optional[int] = ...) -> None: ...

class AckAnswer(_message.Message):
    __slots__ = ("consumer_id", "error", "message", "request_id")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    error: int
    message: bytes
    request_id: int
    def __init__(self, consumer_id: _Optional[int] = ..., error: _Optional[int] = ..., message: _Optional[bytes] = ..., request_id: _Optional[int] = ...) -> None: ...

class Property(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Schema(_message.Message):
    __slots__ = ("name", "definition", "type", "properties")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[Schema.Type]
        STRING: _ClassVar[Schema.Type]
        JSON: _ClassVar[Schema.Type]
        PROTOBUF: _ClassVar[Schema.Type]
        AVRO: _ClassVar[Schema.Type]
        BOOLEAN: _ClassVar[Schema.Type]
        INT8: _ClassVar[Schema.Type]
        INT16: _ClassVar[Schema.Type]
        INT32: _ClassVar[Schema.Type]
        INT64: _ClassVar[Schema.Type]
        FLOAT: _ClassVar[Schema.Type]
        DOUBLE: _ClassVar[Schema.Type]
        DATE: _ClassVar[Schema.Type]
        TIME: _ClassVar[Schema.Type]
        TIMESTAMP: _ClassVar[Schema.Type]
        KEY_VALUE: _ClassVar[Schema.Type]
        INSTANT: _ClassVar[Schema.Type]
        LOCAL_DATE: _ClassVar[Schema.Type]
        LOCAL_TIME: _ClassVar[Schema.Type]
        LOCAL_DATE_TIME: _ClassVar[Schema.Type]
        PROTOBUF_NATIVE: _ClassVar[Schema.Type]
    NONE: Schema.Type
    STRING: Schema.Type
    JSON: Schema.Type
    PROTOBUF: Schema.Type
    AVRO: Schema.Type
    BOOLEAN: Schema.Type
    INT8: Schema.Type
    INT16: Schema.Type
    INT32: Schema.Type
    INT64: Schema.Type
    FLOAT: Schema.Type
    DOUBLE: Schema.Type
    DATE: Schema.Type
    TIME: Schema.Type
    TIMESTAMP: Schema.Type
    KEY_VALUE: Schema.Type
    INSTANT: Schema.Type
    LOCAL_DATE: Schema.Type
    LOCAL_TIME: Schema.Type
    LOCAL_DATE_TIME: Schema.Type
    PROTOBUF_NATIVE: Schema.Type
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    definition: bytes
    type: Schema.Type
    properties: _containers.RepeatedCompositeFieldContainer[Property]
    def __init__(self, name: _Optional[str] = ..., definition: _Optional[bytes] = ..., type: _Optional[_Union[Schema.Type, str]] = ..., properties: _Optional[_Iterable[_Union[Property, _Mapping]]] = ...) -> None: ...

class Producer(_message.Message):
    __slots__ = ("topic", "producer_id", "request_id", "producer_name", "schema", "epoch", "is_named_by_client")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_NAMED_BY_CLIENT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    producer_id: int
    request_id: int
    producer_name: str
    schema: Schema
    epoch: int
    is_named_by_client: bool
    def __init__(self, topic: _Optional[str] = ..., producer_id: _Optional[int] = ..., request_id: _Optional[int] = ..., producer_name: _Optional[str] = ..., schema: _Optional[_Union[Schema, _Mapping]] = ..., epoch: _Optional[int] = ..., is_named_by_client: _Optional[bool] = ...) -> None: ...

class ProducerAnswer(_message.Message):
    __slots__ = ("request_id", "producer_name", "last_sequence_id", "schema_version", "is_ready")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_NAME_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    producer_name: bytes
    last_sequence_id: int
    schema_version: bytes
    is_ready: bool
    def __init__(self, request_id: _Optional[int] = ..., producer_name: _Optional[bytes] = ..., last_sequence_id: _Optional[int] = ..., schema_version: _Optional[bytes] = ..., is_ready: _Optional[bool] = ...) -> None: ...

class CloseProducer(_message.Message):
    __slots__ = ("producer_id", "request_id")
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    producer_id: int
    request_id: int
    def __init__(self, producer_id: _Optional[int] = ..., request_id: _Optional[int] = ...) -> None: ...

class Send(_message.Message):
    __slots__ = ("producer_id", "sequence_id", "n_messages", "highest_sequence_id", "is_chunk")
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    N_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    IS_CHUNK_FIELD_NUMBER: _ClassVar[int]
    producer_id: int
    sequence_id: int
    n_messages: int
    highest_sequence_id: int
    is_chunk: bool
    def __init__(self, producer_id: _Optional[int] = ..., sequence_id: _Optional[int] = ..., n_messages: _Optional[int] = ..., highest_sequence_id: _Optional[int] = ..., is_chunk: _Optional[bool] = ...) -> None: ...

class SendReceipt(_message.Message):
    __slots__ = ("producer_id", "sequence_id", "id", "highest_sequence_id")
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    producer_id: int
    sequence_id: int
    id: MessageId
    highest_sequence_id: int
    def __init__(self, producer_id: _Optional[int] = ..., sequence_id: _Optional[int] = ..., id: _Optional[_Union[MessageId, _Mapping]] = ..., highest_sequence_id: _Optional[int] = ...) -> None: ...

class SendError(_message.Message):
    __slots__ = ("producer_id", "sequence_id", "error", "message")
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    producer_id: int
    sequence_id: int
    error: int
    message: bytes
    def __init__(self, producer_id: _Optional[int] = ..., sequence_id: _Optional[int] = ..., error: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...

class Partitions(_message.Message):
    __slots__ = ("topic", "request_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    request_id: int
    def __init__(self, topic: _Optional[str] = ..., request_id: _Optional[int] = ...) -> None: ...

class PartitionsAnswer(_message.Message):
    __slots__ = ("n", "request_id", "error", "message")
    N_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    n: int
    request_id: int
    error: int
    message: bytes
    def __init__(self, n: _Optional[int] = ..., request_id: _Optional[int] = ..., error: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...

class CloseConsumer(_message.Message):
    __slots__ = ("consumer_id", "request_id")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    request_id: int
    def __init__(self, consumer_id: _Optional[int] = ..., request_id: _Optional[int] = ...) -> None: ...

class GetLastMessageId(_message.Message):
    __slots__ = ("consumer_id", "request_id")
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    consumer_id: int
    request_id: int
    def __init__(self, consumer_id: _Optional[int] = ..., request_id: _Optional[int] = ...) -> None: ...

class LastMessageId(_message.Message):
    __slots__ = ("id", "request_id", "read_to")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    READ_TO_FIELD_NUMBER: _ClassVar[int]
    id: MessageId
    request_id: int
    read_to: MessageId
    def __init__(self, id: _Optional[_Union[MessageId, _Mapping]] = ..., request_id: _Optional[int] = ..., read_to: _Optional[_Union[MessageId, _Mapping]] = ...) -> None: ...

class Success(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    def __init__(self, request_id: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("request_id", "error", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    error: int
    message: bytes
    def __init__(self, request_id: _Optional[int] = ..., error: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Command(_message.Message):
    __slots__ = ("type", "connect", "connected", "subscribe", "producer", "send", "send_receipt", "send_error", "message", "ack", "flow", "success", "error", "close_producer", "close_consumer", "producer_answer", "ping", "pong", "partitions", "partitions_answer", "lookup", "lookup_answer", "get_last_message_id", "last_message_id", "auth_challenge", "auth_response", "ack_answer")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Command.Type]
        CONNECT: _ClassVar[Command.Type]
        CONNECTED: _ClassVar[Command.Type]
        SUBSCRIBE: _ClassVar[Command.Type]
        PRODUCER: _ClassVar[Command.Type]
        SEND: _ClassVar[Command.Type]
        SEND_RECEIPT: _ClassVar[Command.Type]
        SEND_ERROR: _ClassVar[Command.Type]
        MESSAGE: _ClassVar[Command.Type]
        ACK: _ClassVar[Command.Type]
        FLOW: _ClassVar[Command.Type]
        SUCCESS: _ClassVar[Command.Type]
        ERROR: _ClassVar[Command.Type]
        CLOSE_PRODUCER: _ClassVar[Command.Type]
        CLOSE_CONSUMER: _ClassVar[Command.Type]
        PRODUCER_ANSWER: _ClassVar[Command.Type]
        PING: _ClassVar[Command.Type]
        PONG: _ClassVar[Command.Type]
        PARTITIONS: _ClassVar[Command.Type]
        PARTITIONS_ANSWER: _ClassVar[Command.Type]
        LOOKUP: _ClassVar[Command.Type]
        LOOKUP_ANSWER: _ClassVar[Command.Type]
        END_OF_TOPIC: _ClassVar[Command.Type]
        GET_LAST_MESSAGE_ID: _ClassVar[Command.Type]
        LAST_MESSAGE_ID: _ClassVar[Command.Type]
        AUTH_CHALLENGE: _ClassVar[Command.Type]
        AUTH_RESPONSE: _ClassVar[Command.Type]
        ACK_ANSWER: _ClassVar[Command.Type]
        TOPIC_MIGRATED: _ClassVar[Command.Type]
    UNKNOWN: Command.Type
    CONNECT: Command.Type
    CONNECTED: Command.Type
    SUBSCRIBE: Command.Type
    PRODUCER: Command.Type
    SEND: Command.Type
    SEND_RECEIPT: Command.Type
    SEND_ERROR: Command.Type
    MESSAGE: Command.Type
    ACK: Command.Type
    FLOW: Command.Type
    SUCCESS: Command.Type
    ERROR: Command.Type
    CLOSE_PRODUCER: Command.Type
    CLOSE_CONSUMER: Command.Type
    PRODUCER_ANSWER: Command.Type
    PING: Command.Type
    PONG: Command.Type
    PARTITIONS: Command.Type
    PARTITIONS_ANSWER: Command.Type
    LOOKUP: Command.Type
    LOOKUP_ANSWER: Command.Type
    END_OF_TOPIC: Command.Type
    GET_LAST_MESSAGE_ID: Command.Type
    LAST_MESSAGE_ID: Command.Type
    AUTH_CHALLENGE: Command.Type
    AUTH_RESPONSE: Command.Type
    ACK_ANSWER: Command.Type
    TOPIC_MIGRATED: Command.Type
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    SEND_RECEIPT_FIELD_NUMBER: _ClassVar[int]
    SEND_ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CLOSE_PRODUCER_FIELD_NUMBER: _ClassVar[int]
    CLOSE_CONSUMER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ANSWER_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_ANSWER_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_ANSWER_FIELD_NUMBER: _ClassVar[int]
    GET_LAST_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    AUTH_CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    AUTH_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ACK_ANSWER_FIELD_NUMBER: _ClassVar[int]
    type: Command.Type
    connect: Connect
    connected: Connected
    subscribe: Subscribe
    producer: Producer
    send: Send
    send_receipt: SendReceipt
    send_error: SendError
    message: Message
    ack: Ack
    flow: Flow
    success: Success
    error: Error
    close_producer: CloseProducer
    close_consumer: CloseConsumer
    producer_answer: ProducerAnswer
    ping: Nothing
    pong: Nothing
    partitions: Partitions
    partitions_answer: PartitionsAnswer
    lookup: Lookup
    lookup_answer: LookupAnswer
    get_last_message_id: GetLastMessageId
    last_message_id: LastMessageId
    auth_challenge: AuthChallenge
    auth_response: AuthResponse
    ack_answer: AckAnswer
    def __init__(self, type: _Optional[_Union[Command.Type, str]] = ..., connect: _Optional[_Union[Connect, _Mapping]] = ..., connected: _Optional[_Union[Connected, _Mapping]] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., producer: _Optional[_Union[Producer, _Mapping]] = ..., send: _Optional[_Union[Send, _Mapping]] = ..., send_receipt: _Optional[_Union[SendReceipt, _Mapping]] = ..., send_error: _Optional[_Union[SendError, _Mapping]] = ..., message: _Optional[_Union[Message, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., flow: _Optional[_Union[Flow, _Mapping]] = ..., success: _Optional[_Union[Success, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., close_producer: _Optional[_Union[CloseProducer, _Mapping]] = ..., close_consumer: _Optional[_Union[CloseConsumer, _Mapping]] = ..., producer_answer: _Optional[_Union[ProducerAnswer, _Mapping]] = ..., ping: _Optional[_Union[Nothing, _Mapping]] = ..., pong: _Optional[_Union[Nothing, _Mapping]] = ..., partitions: _Optional[_Union[Partitions, _Mapping]] = ..., partitions_answer: _Optional[_Union[PartitionsAnswer, _Mapping]] = ..., lookup: _Optional[_Union[Lookup, _Mapping]] = ..., lookup_answer: _Optional[_Union[LookupAnswer, _Mapping]] = ..., get_last_message_id: _Optional[_Union[GetLastMessageId, _Mapping]] = ..., last_message_id: _Optional[_Union[LastMessageId, _Mapping]] = ..., auth_challenge: _Optional[_Union[AuthChallenge, _Mapping]] = ..., auth_response: _Optional[_Union[AuthResponse, _Mapping]] = ..., ack_answer: _Optional[_Union[AckAnswer, _Mapping]] = ...) -> None: ...
