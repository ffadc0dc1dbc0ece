"""Reads mappings: YAML files that say which columns of a Postgres table make an item. Some ship with the program."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from checkpoint_from_tables.other_systems.item import SourceError
from conf.errors import one_line
from tracker.properties import RESERVED_PREFIX

_FOLDER = Path(__file__).parent / "mappings"


class TableMapping(BaseModel):
    """A table, and SQL expressions over its columns for the parts of a message.

    Attributes:
        table: the table or view, with its schema where that is not in the search path.
        where: a condition for the rows that wait for their time.
        id: unique in the table, and the same for good.
        deliver_at: a timestamp, which is UTC without a zone, or ms since the epoch; null: at once.
        payload: bytes, text or JSON; null: none.
        key: None: messages have none.
        queue: the name to which `--queue` refers; None: there are no queues.
        properties: by name; null values are left out.
        repeats: a condition for rows that repeat by a rule that is not in the table: they are left; None: none does.
        has_schedules: whether payloads may be data of db-scheduler with a schedule, which make recurring messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    table: str
    where: str = "true"
    id: str
    deliver_at: str
    payload: str
    key: str | None = None
    queue: str | None = None
    properties: dict[str, str] = {}
    repeats: str | None = None
    has_schedules: bool = False


def shipped() -> tuple[str, ...]:
    """Returns the names of the mappings that ship with the program, in order."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.yaml")))


def read_mapping(name: str) -> TableMapping:
    """Reads a mapping.

    Args:
        name: one of `shipped`, or a YAML file.

    Raises:
        SourceError: there is no such file, or the file is no mapping.
    """
    file = _FOLDER / f"{name}.yaml" if name in shipped() else Path(name)
    try:
        mapping = TableMapping.model_validate(yaml.safe_load(file.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise SourceError(f"{name}: {place}: {first['msg']}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SourceError(f"{name}: {one_line(error)}") from None
    if reserved := [p for p in mapping.properties if p.startswith(RESERVED_PREFIX)]:
        raise SourceError(
            f"{name}: properties.{reserved[0]}: the job gives properties that begin with {RESERVED_PREFIX}"
        )
    return mapping
