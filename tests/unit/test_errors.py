"""All errors of ours have one root."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

import admin
import broker
import checkpoint_from_tables
import conf
import jobs
import status
import streaming
import tracker
import warehouse
from conf.errors import DelayLakeError


def modules_of(folder: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        yield importlib.import_module(found.name)


@pytest.mark.parametrize(
    "folder", [conf, tracker, status, broker, warehouse, streaming, checkpoint_from_tables, admin, jobs]
)
def test_an_error_of_ours_is_a_delay_lake_error(folder: ModuleType) -> None:
    own = [
        kind
        for module in modules_of(folder)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == module.__name__
    ]
    assert [kind for kind in own if not issubclass(kind, DelayLakeError)] == []
