"""Sealed buckets: out of the state, in the Delta table, back in time."""

from __future__ import annotations

from pathlib import Path

import pulsar
import pyarrow as pa
from chispa import assert_df_equality
from deltalake import DeltaTable, QueryBuilder

from broker.jvm.jars import jars
from broker.standalone import EmbeddedBroker
from streaming.session import create_session
from tests.support.service.harness import Collector, Job, check_exactly_once, now, wait_until

N = 3_000


def test_a_sealed_bucket_costs_no_state_and_comes_back_after_a_crash(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    job = Job(
        tmp_path,
        broker.settings,
        [{"source": topic, "subscriptions": [{"name": "a"}]}],
        tracker={"max_seal_interval_millis": 1000, "load_ahead_millis": 5000},
    )
    collector = Collector(pulsar_client).collect(f"{topic}-a")
    try:
        job.start()
        producer = pulsar_client.create_producer(topic, block_if_queue_full=True)
        begin = now() + int(20_000 * job.pace)
        sent = {f"m{i}": begin + i * 2 for i in range(N)}
        for payload, due in sent.items():
            producer.send_async(payload.encode(), None, properties={"deliverAt": str(due)}, partition_key="k")
        producer.flush()
        wait_until(
            lambda: job.progress and job.progress[-1]["pending"] == N and job.progress[-1]["in_state"] == 0,
            15,
            f"all in buckets, none in state: {job.progress[-1:]}\n{job.log}",
        )
        assert len(job.rows("delayed_index")) == N
        job.kill9()
        _spark_reads_what_delta_rs_reads(job)
        job.start()
        wait_until(lambda: len(collector.received[f"{topic}-a"]) >= N, 90, f"all deliveries\n{job.log}")
        check_exactly_once(sent, collector.received[f"{topic}-a"])
        assert {m.key for m in collector.received[f"{topic}-a"]} == {"k"}
    finally:
        collector.stop()
        job.stop()


def _spark_reads_what_delta_rs_reads(job: Job) -> None:
    path = str(job.folder / "warehouse" / "delayed_index")
    columns = "deliver_at, ledger_id, entry_id, batch_index, operation, key, CAST(payload AS STRING) AS payload"
    spark = create_session(job.settings, "read", jars=sorted(jars("spark").glob("*.jar")), delta=True)
    try:
        by_spark = spark.sql(f"SELECT {columns}, properties['deliverAt'] AS due FROM delta.`{path}`")
        sql = f"SELECT {columns.replace('STRING', 'VARCHAR')}, properties['deliverAt'] AS due FROM delayed_index"
        rows = pa.table(QueryBuilder().register("delayed_index", DeltaTable(path)).execute(sql).read_all())
        due = rows.column("due").to_pylist()
        rows = rows.set_column(7, "due", pa.array([d[0] if isinstance(d, list) else d for d in due], pa.string()))
        by_delta_rs = spark.createDataFrame(rows.to_pylist(), by_spark.schema)
        assert_df_equality(by_spark, by_delta_rs, ignore_row_order=True, ignore_nullable=True)
    finally:
        spark.stop()
