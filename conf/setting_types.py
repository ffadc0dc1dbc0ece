"""The types of settings."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from conf.durations import parse_duration

_TOPIC = re.compile(r"^persistent://[\w\-=:.]+/[\w\-=:.]+/[^/\s]+$")


class Section(BaseModel):
    """A section of the settings, in which unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, given: object, info: ValidationInfo) -> object:
        """Refuses `yes` and `true` where a number is wanted: they would count as 1."""
        if isinstance(given, bool) and cls.model_fields[str(info.field_name)].annotation in (int, float):
            raise ValueError("must be a number")
        return given


def _millis(given: object) -> object:
    return parse_duration(given) if isinstance(given, str) else given


# A number of milliseconds; a text is read as a duration.
Duration = Annotated[int, BeforeValidator(_millis)]


def _persistent_topic(name: str) -> str:
    if not _TOPIC.match(name):
        raise ValueError("must be a topic's full name: persistent://tenant/namespace/topic")
    return name


Topic = Annotated[str, AfterValidator(_persistent_topic)]
Millis = Annotated[int, Field(ge=0)]
PositiveMillis = Annotated[int, Field(gt=0)]
