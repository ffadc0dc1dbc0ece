"""Pulsar's own proxy, in front of a broker."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from broker.jvm.jars import JarsError, jars
from broker.standalone import HOST, JVM_OPTIONS, _claim
from conf.api_settings import ApiSettings
from conf.settings import PulsarSettings
from tests.conftest import TESTS
from tests.support.servers.starting import wait_until_it_answers

OTHER_SYSTEMS = TESTS / "other_systems"


def jars_or_skip(name: str) -> Path:
    """Fetches the JARs of a folder of tests/other_systems; returns that folder.

    Skips the test where they can't be had; fails it if CI is set.
    """
    folder = OTHER_SYSTEMS / name
    try:
        jars(folder)
    except JarsError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return folder


@contextmanager
def proxy(folder: Path, broker: PulsarSettings, tls: ApiSettings) -> Iterator[tuple[PulsarSettings, PulsarSettings]]:
    """Runs a proxy.

    Args:
        folder: of its settings and its log.
        broker: the broker behind it.
        tls: its certificate.

    Yields:
        the settings of its clients, with TLS and without.
    """
    source = jars_or_skip("pulsar-proxy")
    plain, secure, web = (_claim("proxy", 0) for _ in range(3))
    conf = {
        "brokerServiceURL": broker.service_url,
        "brokerWebServiceURL": broker.admin_url,
        "clusterName": "standalone",
        "bindAddress": HOST,
        "advertisedAddress": HOST,
        "servicePort": plain,
        "servicePortTls": secure,
        "webServicePort": web,
        "tlsCertificateFilePath": tls.tls_certificate_file,
        "tlsKeyFilePath": tls.tls_key_file,
        "brokerProxyAllowedHostNames": "*",
        "brokerProxyAllowedIPAddresses": "*",
        "brokerProxyAllowedTargetPorts": "*",
    }
    folder.mkdir(exist_ok=True)
    (folder / "proxy.conf").write_text("".join(f"{name}={value}\n" for name, value in conf.items()))
    log = folder / "proxy.log"
    command = ["java", *JVM_OPTIONS, "-cp", f"{jars(source)}/*", "org.apache.pulsar.proxy.server.ProxyServiceStarter"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "-c", str(folder / "proxy.conf")], stdout=output, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        admin = f"http://{HOST}:{web}"
        # It answers itself as soon as it passes on what the broker says.
        wait_until_it_answers(
            process,
            log,
            lambda: httpx.get(f"{admin}/admin/v2/namespaces/public", timeout=20).raise_for_status(),
            httpx.HTTPError,
            seconds=180,
        )
        yield (
            PulsarSettings(
                service_url=f"pulsar+ssl://{HOST}:{secure}", admin_url=admin, trust_certs_file=tls.tls_certificate_file
            ),
            PulsarSettings(service_url=f"pulsar://{HOST}:{plain}", admin_url=admin),
        )
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
