"""Work done by several processes has the same result: on Spark see tests/integration/warehouse/test_engines.py."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conf.settings import Settings, SparkSettings
from jobs.options import SPARK_ROWS, EngineName, engine_of
from tests.support.warehouse.random_warehouse import copied, done_by, random_warehouse
from warehouse.delta.engine import LOCAL, Engine

CLUSTER = Settings(spark=SparkSettings(master="spark://master:7077"))


class OtherProcesses(Engine):
    """Does each thing as if it were sent to another process, and the result back; the first time in vain."""

    def each(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        for item in items:
            for _ in range(2):
                sent, to = pickle.loads(pickle.dumps((function, item)))
                result = pickle.loads(pickle.dumps(sent(to)))
            yield result


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 13))
def test_random_tables_are_maintained_alike(seed: int, tmp_path: Path) -> None:
    made = random_warehouse(tmp_path / "a", seed)
    other = copied(made, tmp_path / "b")
    local = done_by(LOCAL, made)
    merged, deleted = (sum(count[i] for count in local[0]) for i in (1, 2))
    assert (merged > 0, deleted > 0) == (True, True)
    assert done_by(OtherProcesses(), other) == local


def test_on_one_machine_everything_is_done_in_the_process_unless_asked_for() -> None:
    with engine_of(Settings(), None) as engine:
        assert engine.of(10 * SPARK_ROWS) is LOCAL
    with engine_of(Settings(), EngineName.SPARK) as engine:
        assert engine.of(0) is engine


def test_on_a_cluster_what_is_large_goes_to_spark() -> None:
    with engine_of(CLUSTER, None) as engine:
        assert engine.of(SPARK_ROWS - 1) is LOCAL
        assert engine.of(SPARK_ROWS) is engine
    with engine_of(CLUSTER, EngineName.LOCAL) as engine:
        assert engine.of(SPARK_ROWS) is LOCAL
