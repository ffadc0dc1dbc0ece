"""Jobs as RQ itself writes them to a real server: those that repeat are no silent one-off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import redis
import rq

from checkpoint_from_tables.other_systems.rq import RQ
from tests.support.servers.redis_server import redis_server

pytestmark = pytest.mark.slow

AT = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[redis.Redis]:
    with redis_server(tmp_path) as server:
        yield server


def test_jobs_that_repeat_recur_or_are_counted(server: redis.Redis) -> None:
    queue = rq.Queue("mail", connection=server, serializer=rq.serializers.JSONSerializer)
    for name, repeat in {
        "once": None,
        "even": rq.Repeat(3, 60),
        "odd": rq.Repeat(3, [60, 90]),
        "at once": rq.Repeat(3),
    }.items():
        queue.enqueue_at(AT, name, repeat=repeat)
    cut_off = queue.enqueue_at(AT, "cut off")
    key = f"rq:job:{cut_off.id}"
    data = server.hget(key, "data")
    assert isinstance(data, bytes)
    server.hset(key, "data", data[:-3])
    source = RQ(server, [], "")
    found = list(source.items())
    taken = {json.loads(one.payload or b"")[0]: one.properties.get("repeat") for one in found if one.reason is None}
    assert taken == {"once": None, "even": "@every 60000ms"}
    [times] = [one.properties["repeatTimes"] for one in found if "repeat" in one.properties]
    assert times == "4", "the run that waits, and three after it"
    assert [one.reason for one in found if one.reason is not None] == [
        "its data is cut off: a zlib stream without its end"
    ]
    assert source.left == {"repeats, left": 2}
