"""What the tests of the running job share."""

from __future__ import annotations

from collections.abc import Iterator

import pulsar
import pytest

from tests.support.service.harness import Collector


@pytest.fixture
def collector(pulsar_client: pulsar.Client) -> Iterator[Collector]:
    collector = Collector(pulsar_client)
    yield collector
    collector.stop()
