"""The oldest version of Pulsar that is supported: the tests of the protocol, and the job's main path.

Which it is: https://pulsar.apache.org/contribute/release-policy/.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pulsar
import pytest

from broker.client import connect
from broker.standalone import EmbeddedBroker
from tests.integration.broker.test_producing import *  # noqa: F403
from tests.integration.broker.test_protocol import *  # noqa: F403
from tests.support.servers.pulsar_proxy import jars_or_skip
from tests.support.service import main_path

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def jar_set() -> Path:
    return jars_or_skip("pulsar-4.0")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, jar_set: Path) -> Iterator[EmbeddedBroker]:
    made = EmbeddedBroker(tmp_path_factory.mktemp("broker"), jar_set=jar_set)
    try:
        made.start(port=0, http_port=0)
        yield made
    finally:
        made.kill()


@pytest.fixture(scope="module")
def pulsar_client(broker: EmbeddedBroker) -> Iterator[pulsar.Client]:
    client = connect(broker.settings)
    yield client
    client.close()


def test_it_is_that_version(broker: EmbeddedBroker) -> None:
    url = f"{broker.settings.admin_url}/admin/v2/brokers/version"
    assert httpx.get(url, timeout=60).text.startswith("4.0.")


def test_a_job_delivers_each_message_once(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    def unload(name: str) -> None:
        url = f"{broker.settings.admin_url}/admin/v2/{name.replace('://', '/')}/unload"
        httpx.put(url, timeout=60).raise_for_status()

    main_path.delivers_once(tmp_path, broker.settings, pulsar_client, topic, unload)
