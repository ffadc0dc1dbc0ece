"""What any client can send and not every one can read is put aside, and holds up nothing else."""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path
from typing import Any

import _pulsar
import pulsar

from broker.protocol.wire.pulsar_pb2 import ZLIB, BatchedMetadata
from broker.standalone import EmbeddedBroker
from tests.support.clients.raw_producer import RawProducer, batch, entry, metadata
from tests.support.service.harness import Collector, Job, now, wait_until

MEGABYTE = 1024 * 1024


def test_what_cannot_be_read_or_sent_on_is_put_aside_and_holds_up_nothing(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path, collector: Collector
) -> None:
    urls = {"service_url": broker.settings.service_url, "admin_url": broker.settings.admin_url}
    pulsar_settings = {**urls, "max_chunked_message_bytes": 0}  # so what does not fit an entry can't be sent on
    job = Job(tmp_path, broker.settings, [{"source": topic, "subscriptions": [{"name": "a"}]}], pulsar=pulsar_settings)
    collector.collect(f"{topic}-a").collect(f"{topic}-rejects")
    public, private = tmp_path / "public.pem", tmp_path / "private.pem"
    openssl = ["openssl", "genrsa", "-out", str(private), "2048"], ["openssl", "rsa", "-in", str(private), "-pubout"]
    subprocess.run(openssl[0], check=True, capture_output=True)
    public.write_bytes(subprocess.run(openssl[1], check=True, capture_output=True).stdout)
    plain = pulsar_client.create_producer(topic, batching_enabled=False)
    chunked = pulsar_client.create_producer(topic, batching_enabled=False, chunking_enabled=True)
    encrypted = pulsar_client.create_producer(
        topic,
        encryption_key="key",
        crypto_key_reader=pulsar.CryptoKeyReader(str(public), str(private)),
        batching_enabled=False,
    )

    def send(producer: Any, content: bytes, **values: Any) -> None:
        builder = _pulsar.MessageBuilder()
        builder.content(content)
        for name, value in values.items():
            for one in value if isinstance(value, list) else [value]:
                getattr(builder, name)(*one) if isinstance(one, tuple) else getattr(builder, name)(one)
        producer._producer.send(builder.build())

    good: list[bytes] = []

    def send_good() -> None:
        good.append(b"good %d" % len(good))
        plain.send(good[-1], properties={"deliverAt": str(now() + 2_000)})

    # The last command before the start is none that can be read: it keeps nothing from coming in.
    control = pulsar_client.create_producer(job.settings.control.topic)
    send(control, b"no command", partition_key=b"\xff")
    try:
        send_good()
        job.start()
        large = b"l" * 5_238_000
        # An outcome would have such an id.
        redriven = [("retryOf", "7:0"), ("retrySubscription", "a"), ("redriveRequest", "r" * 2_700_000)]
        odd: list[tuple[Any, bytes, dict[str, Any], str]] = [
            (plain, b"key", {"partition_key": b"\xff"}, "what is not UTF-8 can't be read: key"),
            (plain, b"name", {"property": (b"\xff", b"1")}, "what is not UTF-8 can't be read: properties"),
            (plain, b"value", {"property": ("a", b"\xfe")}, "what is not UTF-8 can't be read: properties"),
            # Its time is not waited for: it would keep a release's lane from all that comes after.
            (
                plain,
                b"event",
                {"event_timestamp": 2**63, "property": ("deliverAt", str(now() + 86_400_000))},
                f"the event time {2**63} is negative or beyond 2^63",
            ),
            (plain, b"redriven", {"property": redriven}, "redriveRequest has more than 256 bytes"),
            (plain, large, {"partition_key": "k" * 3_500}, "bytes are too many to be delivered"),
            (chunked, b"c" * (6 * MEGABYTE), {}, "bytes are too many to be delivered"),
            (encrypted, b"secret", {}, "encrypted, and no key that decrypts it is in the settings"),
        ]
        for producer, content, values, _ in odd:
            send(producer, content, **values)
            send_good()
        raw, n_bombs = RawProducer(broker.settings.service_url, topic), 10
        bomb = zlib.compress(bytes(12 * MEGABYTE))  # a row each, of which Spark's JVM would have to keep copies
        for i in range(n_bombs):
            described = metadata(i + 1, now(), compression=ZLIB, uncompressed_size=12 * MEGABYTE)
            raw.send(entry(described, bomb), i + 1)
        odd += [(raw, bomb, {}, f"{12 * MEGABYTE} bytes are too many to be delivered")] * n_bombs
        shared = metadata(n_bombs + 1, now(), producer_name=b"p" * 4 * MEGABYTE, n_messages=1_000)
        raw.send(entry(shared, batch((BatchedMetadata(), b"b") for _ in range(1_000))), n_bombs + 1, 1_000)
        good += [b"b"] * 1_000  # if each had its producer's name, they would be 4 GB
        raw.flush()
        raw.close()
        send_good()
        wait_until(lambda: len(collector.received[f"{topic}-a"]) >= len(good), 60, f"all good ones\n{job.log}")
        rejects = wait_until(
            lambda: len(found := job.rows("rejects")) == len(odd) + 1 and found, 30, f"all odd ones\n{job.log}"
        )
        assert sorted(m.payload for m in collector.received[f"{topic}-a"]) == sorted(good)
        wait_until(lambda: len(collector.received[f"{topic}-rejects"]) == len(odd), 30, "the topic of rejects")
        of_source = sorted((r for r in rejects if r["topic"] == topic), key=lambda r: (r["ledger_id"], r["entry_id"]))
        for row, (_, content, _, reason) in zip(of_source, odd, strict=True):
            assert reason in row["reason"]
            assert row["payload"] == content or (row["payload"] and "encrypted" in reason)
        [command] = [r for r in rejects if r["topic"] != topic]
        assert (command["payload"], command["reason"]) == (b"no command", "the bytes are no command")
        assert job.terminate() == 0
    finally:
        job.stop()
