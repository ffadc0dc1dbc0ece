"""The types of settings."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from conf.times import parse_duration

_TOPIC = re.compile(r"persistent://[\w\-=:.]+/[\w\-=:.]+/[^/\s\x00-\x1f\x7f]+")


class Section(BaseModel):
    """A section of the settings, in which unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuses `yes` and `true` where a number is wanted: they would count as 1."""
        wanted = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and any(
            kind in (int, float) for kind in (wanted, *(getattr(a, "__origin__", a) for a in get_args(wanted)))
        ):
            raise ValueError("must be a number")
        return value


def _millis(value: object) -> object:
    return parse_duration(value) if isinstance(value, str) else value


# A number of milliseconds; a text is read as a duration.
Duration = Annotated[int, BeforeValidator(_millis)]


def _persistent_topic(name: str) -> str:
    if not _TOPIC.fullmatch(name):
        raise ValueError("must be a topic's full name: persistent://tenant/namespace/topic")
    return name


Topic = Annotated[str, AfterValidator(_persistent_topic)]

_MOST_SHARDS = 1024


def _shard_count(value: object) -> object:
    if value == "auto":
        return value
    text = str(value)
    if not (isinstance(value, int | str) and text.isascii() and text.isdigit() and 0 < int(text) <= _MOST_SHARDS):
        raise ValueError(f"must be a number from 1 to {_MOST_SHARDS}, or auto")
    return int(text)


ShardCount = Annotated[int | Literal["auto"], BeforeValidator(_shard_count)]
# Numbers are bounded so that sums with times of messages stay within 64 bits: ms by some 30,000 years.
MOST = 10**15
Millis = Annotated[int, Field(ge=0, le=MOST)]
PositiveMillis = Annotated[int, Field(gt=0, le=MOST)]
Count = Annotated[int, Field(gt=0, le=MOST)]
