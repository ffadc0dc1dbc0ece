"""The settings: read from a YAML file and the environment, validated once at the start."""

from __future__ import annotations

import functools
import json
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlparse
from urllib.request import url2pathname

import yaml
from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from conf.api_settings import ApiSettings, AuthSettings
from conf.errors import DelayLakeError
from conf.partitions import without_partition
from conf.route_circles import find_circle
from conf.setting_types import MOST, Count, Duration, Millis, PositiveMillis, Section, ShardCount, Topic
from conf.settings_environment import EnvironmentSource, unknown_variables
from conf.settings_file import SettingsTree, in_order, unreadable, wrong_settings
from conf.shaping import Rate, Window

# The default settings file, unless the working folder has one at the path below.
DEFAULT_SETTINGS_FILE = Path(__file__).parent / "delaylake.yaml"
_WORKING_FOLDERS_FILE = Path("conf/delaylake.yaml")

MOST_LANES = 64

_ENVIRONMENT_PREFIX = "DELAYLAKE_"


class SettingsError(DelayLakeError):
    """The settings file can't be read, or settings are unknown or wrong. The message has a line for each of them.

    Those of the file are in the order of its lines, behind those of the environment.
    """

    @property
    def lines(self) -> list[str]:
        """A line for each wrong setting."""
        return str(self).splitlines()


def checked_place(uri: str) -> str:
    """Returns the URI of a folder or of a place in object storage, as it is.

    Raises:
        ValueError: it would silently be another folder: the working folder, one with the name `~`, or one of a host.
    """
    parts = urlparse(uri)
    if is_object_storage(uri):
        if not parts.netloc:
            raise ValueError("must have a bucket, as s3://bucket/folder")
    elif not parts.path.strip() or parts.path.startswith("~") or parts.netloc not in ("", "localhost"):
        raise ValueError("must be a path, as /folder or file:./folder; neither ~ nor a host is looked up")
    return uri


def _local(uri: str) -> str:
    if is_object_storage(uri):
        raise ValueError("must be a folder, file:... or a path, that all machines of the job share")
    return uri


# A comma separates names where several are given, and `*` is all of them.
_NAME = re.compile(r"[^/\s*,\x00-\x1f\x7f]|[^/\s,\x00-\x1f\x7f]{2,}")


def _subscription_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("must be a name without blanks, slashes and commas, and not *")
    return name


class SubscriptionType(StrEnum):
    """Pulsar's subscription types."""

    EXCLUSIVE = "Exclusive"
    FAILOVER = "Failover"
    SHARED = "Shared"
    KEY_SHARED = "Key_Shared"

    @property
    def is_cumulative(self) -> bool:
        """Whether consumers acknowledge cumulatively, so that no single message can be skipped."""
        return self in (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER)


class PulsarSettings(Section):
    service_url: Annotated[str, Field(pattern=r"^pulsar(\+ssl)?://\S+$")] = "pulsar://127.0.0.1:6650"
    admin_url: Annotated[str, Field(pattern=r"^https?://\S+$")] = "http://127.0.0.1:8080"
    token_file: Path | None = None
    trust_certs_file: Path | None = None
    crypto_private_key_file: Path | None = None
    subscription: Annotated[str, Field(min_length=1)] = "delaylake"
    max_message_size_bytes: Annotated[int, Field(ge=65_536)] = 5_242_880
    max_chunked_message_bytes: Annotated[int, Field(ge=0)] = 10_485_760

    @model_validator(mode="before")
    @classmethod
    def _with_key_reader(cls, data: Any) -> Any:
        """Takes `crypto_key_reader: {private_key_file: ...}` as `crypto_private_key_file`."""
        if not isinstance(data, dict) or "crypto_key_reader" not in data:
            return data
        others = {name: value for name, value in data.items() if name != "crypto_key_reader"}
        reader = data["crypto_key_reader"]
        if reader is None:
            return others
        if not isinstance(reader, dict) or reader.keys() != {"private_key_file"}:
            raise ValueError("crypto_key_reader has private_key_file, and nothing else")
        if others.get("crypto_private_key_file") is not None:
            raise ValueError("crypto_key_reader and crypto_private_key_file are the same: name one")
        return {**others, "crypto_private_key_file": reader["private_key_file"]}


class ControlSettings(Section):
    topic: Topic = "persistent://public/default/delaylake-control"
    outcome_topic: Topic = "persistent://public/default/delaylake-outcomes"

    @model_validator(mode="after")
    def _differ(self) -> ControlSettings:
        if self.topic == self.outcome_topic:
            raise ValueError("topic and outcome_topic must differ: outcomes are no commands")
        return self


class SparkSettings(Section):
    master: Annotated[str, Field(min_length=1)] = "local[*]"
    conf: dict[str, str | int | float | bool] = {}

    @field_validator("conf", mode="before")
    @classmethod
    def _of_single_values(cls, section: object) -> object:
        for name, value in section.items() if isinstance(section, dict) else ():
            if not isinstance(value, str | int | float):
                raise ValueError(f"{name} must be a text, a number, true or false, as `spark.driver.memory: 4g`")
        return section


class IngestSettings(Section):
    max_messages_per_batch: Count = 20_000
    max_bytes_per_batch: Annotated[int, Field(gt=0, le=64 << 20)] = 16 << 20
    batch_interval_millis: Annotated[int, Field(ge=300, le=1_200)] = 600
    min_free_bytes: Annotated[int, Field(ge=0, le=MOST)] = 256 << 20


class TrackerSettings(Section):
    tick_time_millis: PositiveMillis = 1000
    min_index_count_per_bucket: Count = 50_000
    max_time_step_per_bucket_snapshot_segment_seconds: Annotated[int, Field(gt=0, le=MOST // 1000)] = 300
    max_indexes_per_bucket_snapshot_segment: Count = 5_000
    max_num_buckets: Count = 50
    max_delay_millis: Millis = 0
    min_repeat_millis: Annotated[int, Field(ge=1_000, le=MOST)] = 1_000
    max_recurring_messages: Annotated[int, Field(ge=0, le=MOST)] = 100_000
    shards: ShardCount = 2
    max_seal_interval_millis: Annotated[int, Field(ge=500, le=MOST)] = 5_000
    load_ahead_millis: Annotated[int, Field(ge=1000, le=MOST)] = 30_000
    schedule_key_idle_millis: Millis = 600_000
    taken_back_compression_type: Literal["NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"] = "NONE"
    taken_back_compression_threshold_bytes: Annotated[int, Field(ge=0, le=MOST)] = 16_384

    @property
    def shard_count(self) -> int:
        """The number of shards.

        Raises:
            ValueError: it is `auto`, and `streaming.checkpoint.shard_count.with_shard_count` was not called.
        """
        return int(self.shards)


class ReleaseSettings(Section):
    lookahead_millis: Annotated[int, Field(ge=200, le=60_000)] = 2_500
    min_lookahead_millis: Annotated[int, Field(ge=0)] = 600
    max_lookahead_millis: Annotated[int, Field(ge=200, le=60_000)] = 4_000
    lanes: Annotated[int, Field(gt=0, le=MOST_LANES)] = 4
    batch_millis: Annotated[int, Field(ge=0, le=1_000)] = 5
    max_in_flight_messages: Count = 100_000
    retry_max_millis: Annotated[int, Field(ge=1_000, le=MOST)] = 30_000
    slow_after_millis: Millis = 3_000
    unwritable: Literal["wait", "reject"] = "wait"
    unwritable_after_millis: PositiveMillis = 3_600_000

    @model_validator(mode="after")
    def _floor_below_ceiling(self) -> ReleaseSettings:
        if self.min_lookahead_millis > self.lookahead_millis:
            raise ValueError("min_lookahead_millis must not be above lookahead_millis")
        return self

    @property
    def lookahead_ceiling_millis(self) -> int:
        return max(self.lookahead_millis, self.max_lookahead_millis)


class MetricsSettings(Section):
    """The address at which the job serves its metrics; port 0: it does not."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 0


_WEEK_MILLIS = 7 * 24 * 3600 * 1000
_YEAR_MILLIS = 366 * 24 * 3600 * 1000


class RetentionSettings(Section):
    """How long rows stay that nobody needs any more."""

    delayed_index_millis: PositiveMillis = _WEEK_MILLIS
    deliveries_millis: PositiveMillis = _WEEK_MILLIS
    outcomes_millis: PositiveMillis = _WEEK_MILLIS
    entries_millis: PositiveMillis = _WEEK_MILLIS
    rejects_millis: PositiveMillis = _WEEK_MILLIS
    refusals_millis: PositiveMillis = _WEEK_MILLIS


class MaintainSettings(Section):
    automatic: bool = True
    interval_millis: Annotated[int, Field(ge=1000, le=MOST)] = 60_000
    retention_interval_millis: Annotated[int, Field(ge=1000, le=MOST)] = 3_600_000
    min_small_files: Count = 10
    keep_versions_millis: Annotated[int, Field(ge=60_000, le=MOST)] = 6 * 3600 * 1000


class BackoffSettings(Section):
    """The retries of messages on which a subscription's consumers failed. Times are in ms."""

    first: Annotated[Duration, Field(ge=1, le=_YEAR_MILLIS)] = 10_000
    factor: Annotated[float, Field(ge=1, le=100)] = 2.0
    max: Annotated[Duration, Field(ge=1, le=_YEAR_MILLIS)] = 3_600_000
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.1
    attempts: Annotated[int, Field(ge=0, le=1_000)] = 5

    @model_validator(mode="after")
    def _first_below_max(self) -> BackoffSettings:
        if self.first > self.max:
            raise ValueError("first must not be above max")
        return self


class Subscription(Section):
    name: Annotated[str, AfterValidator(_subscription_name)]
    type: SubscriptionType = SubscriptionType.SHARED
    destination: Topic
    rate: Rate | None = None
    windows: tuple[Window, ...] = ()
    order: Literal["none", "key"] = "none"
    backoff: BackoffSettings | None = None
    expire_after: Annotated[Duration, Field(ge=1, le=_YEAR_MILLIS)] | None = None

    @property
    def dead_letter_topic(self) -> str:
        return dead_letter_topic(self.destination)


class Route(Section):
    """A source topic and the subscriptions to which its messages are delivered."""

    source: Topic
    subscriptions: Annotated[tuple[Subscription, ...], Field(min_length=1, max_length=63)]

    @model_validator(mode="before")
    @classmethod
    def _default_destinations(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("subscriptions"), list | tuple):
            return data
        subscriptions = [
            {"destination": f"{data.get('source')}-{s.get('name')}", **s} if isinstance(s, dict) else s
            for s in data["subscriptions"]
        ]
        return {**data, "subscriptions": subscriptions}

    @model_validator(mode="after")
    def _distinct(self) -> Route:
        names = [s.name for s in self.subscriptions]
        if len(set(names)) < len(names):
            raise ValueError("subscription names must differ")
        if any(s.destination == self.source for s in self.subscriptions):
            raise ValueError("a destination must not be its own source")
        return self

    @property
    def rejects_topic(self) -> str:
        return rejects_topic(self.source)

    @property
    def written_topics(self) -> list[str]:
        """The topics that messages of the route may go to: destinations, dead letters, rejects."""
        of_subscriptions = [topic for s in self.subscriptions for topic in (s.destination, s.dead_letter_topic)]
        return [*of_subscriptions, self.rejects_topic]


def rejects_topic(source: str) -> str:
    """Returns the topic to which a source topic's rejected messages are sent."""
    return f"{source}-rejects"


def dead_letter_topic(destination: str) -> str:
    """Returns the topic for dead letters of a destination: messages that have had all their retries."""
    return f"{destination}-dlq"


class Settings(BaseSettings):
    """All settings. Precedence: environment, then the file, then the defaults."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=_ENVIRONMENT_PREFIX,
        env_nested_delimiter="__",
        env_parse_none_str="null",
    )

    pulsar: PulsarSettings = PulsarSettings()
    control: ControlSettings = ControlSettings()
    warehouse: Annotated[str, AfterValidator(checked_place)] = "file:./.delaylake/warehouse"
    checkpoint: Annotated[str, AfterValidator(checked_place), AfterValidator(_local)] = "file:./.delaylake/checkpoint"
    spark: SparkSettings = SparkSettings()
    ingest: IngestSettings = IngestSettings()
    tracker: TrackerSettings = TrackerSettings()
    release: ReleaseSettings = ReleaseSettings()
    api: ApiSettings = ApiSettings()
    metrics: MetricsSettings = MetricsSettings()
    auth: AuthSettings = AuthSettings()
    retention: RetentionSettings = RetentionSettings()
    maintain: MaintainSettings = MaintainSettings()
    replicated: Literal["local-only", "all"] = "local-only"
    routes: tuple[Route, ...] = ()
    _file: Path | None = PrivateAttr(default=None)

    @property
    def file(self) -> Path | None:
        """The absolute path of the settings file; None: the settings were not read by `load_settings`."""
        return self._file

    def no_tables(self, name: str = "") -> str:
        """Returns the error text for a warehouse without tables, or without the table `name`."""
        what = f"no table {name} in the warehouse" if name else "no tables in"
        read = f" (settings: {self.file})" if self.file else ""
        return f"{what} {self.warehouse}: has the job run?{read}"

    @model_validator(mode="after")
    def _goes_together(self) -> Settings:
        sources = [route.source for route in self.routes]
        if len(set(sources)) < len(sources):
            raise ValueError("routes must have different sources")
        if inner := [source for source in sources if source != without_partition(source) in sources]:
            raise ValueError(f"the source {inner[0]} is a partition of another route's: it would be read twice")
        if self.control.topic in sources:
            raise ValueError("control.topic must not be the source of a route")
        self._check_destinations()
        if not is_object_storage(self.warehouse) and local_path(self.warehouse) == local_path(self.checkpoint):
            raise ValueError("warehouse and checkpoint must be different folders")
        return self

    def _check_destinations(self) -> None:
        """Raises ValueError where a route writes a topic of the service itself, or routes go round in a circle."""
        own = {self.control.topic: "control.topic", self.control.outcome_topic: "control.outcome_topic"}
        written: dict[str, list[str]] = {}
        for route in self.routes:
            topics = [without_partition(topic) for topic in route.written_topics]
            written.setdefault(without_partition(route.source), []).extend(topics)
            for topic in topics:
                if topic in own:
                    raise ValueError(f"the route of {route.source} writes {topic}, which is {own[topic]}")
        if circle := find_circle(written):
            raise ValueError(f"routes go round in a circle, for ever: {' -> '.join(circle)}")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, EnvironmentSource(settings_cls), YamlConfigSettingsSource(settings_cls)

    def route(self, source: str) -> Route | None:
        """Returns the route of a source topic; None: there is none."""
        return next((route for route in self.routes if route.source == source), None)


def load_settings(file: Path | None = None) -> Settings:
    """Reads the settings from a file and the environment.

    Args:
        file: the file; None: the one that DELAYLAKE_CONFIG names, else conf/delaylake.yaml of the working folder, else
            the program's default.

    Raises:
        SettingsError: the file is missing, not YAML, or not a mapping; or a setting is unknown, wrong, or there twice.
    """
    default = _WORKING_FOLDERS_FILE if _WORKING_FOLDERS_FILE.is_file() else DEFAULT_SETTINGS_FILE
    path = file or Path(os.environ.get("DELAYLAKE_CONFIG") or default)
    if not os.path.isfile(path):  # Path.is_file raises an error where a name is too long
        raise SettingsError(f"no settings file at {path}: name one with --config or DELAYLAKE_CONFIG")

    class FromFile(Settings):
        model_config = SettingsConfigDict(yaml_file=path)

    unknown = unknown_variables(_ENVIRONMENT_PREFIX, Settings)
    try:
        tree = SettingsTree(path)
        wrong = in_order([*unknown, *tree.repeated, *tree.wrong], path)
        if tree.wrong:
            raise SettingsError("\n".join(wrong))
        settings = FromFile()
        settings._file = path.absolute()
    except ValidationError as error:
        wrong += wrong_settings(error, path, tree.root, _ENVIRONMENT_PREFIX)
        raise SettingsError("\n".join(in_order(wrong, path))) from error
    except (ValueError, OSError, yaml.YAMLError, RecursionError) as error:
        raise SettingsError("\n".join([*unknown, unreadable(error, path)])) from error
    if wrong:
        raise SettingsError("\n".join(wrong))
    return settings


@functools.lru_cache(maxsize=1)
def settings_from_json(text: str) -> Settings:
    """Returns the settings that `Settings.model_dump_json` wrote; the same object where they are the last ones again.

    A worker process reads them for each task, and to check a thousand routes takes 20 ms.
    """
    return Settings(**json.loads(text))


def is_object_storage(uri: str) -> bool:
    """Whether a URI names object storage, as s3://bucket/..., and not a folder."""
    return urlparse(uri).scheme not in ("", "file")


def local_threads(master: str) -> int | None:
    """Returns how many threads a local Spark master has; None: it is a cluster's, or says how often tasks may fail."""
    local = re.fullmatch(r"local(\[(\*|\d+)\])?", master)
    return local and ({None: 1, "*": os.cpu_count() or 1}.get(local[2]) or int(local[2]))


def local_path(uri: str) -> str:
    """Returns a `file:` URI or a path as an absolute local path, and a URI of object storage unchanged."""
    if is_object_storage(uri):
        return uri
    return os.path.abspath(url2pathname(urlparse(uri).path or uri.removeprefix("file:")))
