"""Which version of Pulsar the tests start brokers of."""

from __future__ import annotations

import pytest

from broker.jvm.jars import JarSet


@pytest.fixture(scope="module")
def jar_set() -> JarSet:
    return "broker"
