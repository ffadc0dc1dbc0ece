"""What waits on a running job: it is listed, counted, cancelled by a filter, and what is left is what comes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pulsar
import pytest
from delaylake.commands import Ids
from delaylake.wire.delaylake_pb2 import ControlOutcome

from admin.control.client import ControlClient
from broker.entries.message_ids import MessageRef
from broker.standalone import EmbeddedBroker
from tests.support.clients.repeated import repeat_soon
from tests.support.service.admin_api import served
from tests.support.service.harness import Collector, Job, now, wait_until
from tracker.commands.kinds import CANCEL
from warehouse.queries.listing import PendingFilter
from warehouse.queries.pending_messages import Pending


def miss_an_outcome(patch: pytest.MonkeyPatch) -> list[ControlOutcome]:
    """Has the command line's client pass over the next outcome, as of a topic that the broker unloads; returns it.

    The client repeats the command soon, and has all of its time-out for the answer.
    """
    repeat_soon(patch)
    missed: list[ControlOutcome] = []
    read = ControlClient._next_outcome

    def next_outcome(client: ControlClient, deadline: float) -> ControlOutcome:
        if not missed:
            missed.append(read(client, deadline))
        return read(client, deadline)

    patch.setattr(ControlClient, "_next_outcome", next_outcome)
    return missed


def test_what_is_listed_and_not_cancelled_by_a_filter_is_what_comes(
    broker: EmbeddedBroker, pulsar_client: pulsar.Client, topic: str, tmp_path: Path
) -> None:
    job = Job(
        tmp_path,
        broker.settings,
        [{"source": topic, "subscriptions": [{"name": "a"}, {"name": "x", "type": "Exclusive"}]}],
        tracker={"max_seal_interval_millis": 1500, "load_ahead_millis": 9000},
    )
    collector = Collector(pulsar_client).collect(f"{topic}-a").collect(f"{topic}-x")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return job.command(*arguments, "--output", "json")

    def done(*arguments: str) -> Any:
        result = run(*arguments)
        assert result.returncode == 0, f"{result.stderr}\n{job.log}"
        return json.loads(result.stdout)

    try:
        job.start()
        due = now() + int(150_000 * job.pace)
        producer = pulsar_client.create_producer(topic, batching_enabled=False)
        ids = []
        for i in range(30):
            properties = {"deliverAt": str(due + i), "color": "red" if i % 2 else "blue"}
            sent = producer.send(f"m{i}".encode(), properties=properties, partition_key=f"k{i % 3}")
            ids.append(MessageRef(sent.ledger_id(), sent.entry_id()))
        batching = pulsar_client.create_producer(topic, batching_enabled=True, batching_max_publish_delay_ms=2_000)
        for i, key in enumerate(["left", "left", "right", "right"]):
            batching.send_async(f"b{i}".encode(), None, properties={"deliverAt": str(due + 100)}, partition_key=key)
        batching.flush()
        with ControlClient(job.settings, "tester") as client:
            assert all(o.is_done for o in client.send(topic, CANCEL, Ids([ids[0]], [due]), [], 90))
            assert all(o.is_done for o in client.send(topic, CANCEL, Ids([ids[1]], [due + 1]), ["a"], 90))

        def n_pending(**wanted: Any) -> int:
            return Pending(job.settings, topic, PendingFilter(**wanted)).count()

        wait_until(lambda: (n_pending(subscription="a"), n_pending()) == (32, 33), 20, f"buckets\n{job.log}")
        listed = done("pending", topic)["messages"]
        assert [m["messageId"] for m in listed[:29]] == [str(m) for m in ids[1:]]
        assert [m["batchIndex"] for m in listed[29:]] == [0, 1, 2, 3]
        assert [m["subscriptions"] for m in listed] == [["x"], *[["a", "x"]] * 32]
        red = done("pending", topic, "--subscription", "a", "--property", "color=red", "--limit", "3")
        assert [m["messageId"] for m in red["messages"]] == [str(ids[i]) for i in (3, 5, 7)]
        late = done("pending", topic, "--due-after", str(due + 20), "--due-before", str(due + 25))
        assert [m["deliverAt"] for m in late["messages"]] == [due + i for i in range(20, 25)]
        stats = done("pending", topic, "--stats")["subscriptions"]
        assert [(s["pending"], s["dueWithinHour"], s["takenBack"]) for s in stats] == [(32, 32, 2), (33, 33, 1)]
        assert (stats[0]["earliest"], stats[0]["latest"]) == (due + 2, due + 100)
        assert done("pending", topic, "--count") == {"count": 33}

        k1 = ("topics", "cancel-by-filter", topic, "--key", "k1")
        matching = done(*k1, "--dry-run")
        assert matching["matched"] == 10
        assert [m["messageId"] for m in matching["messages"]] == [str(m) for m in ids[1::3]]
        for refused, reason in (
            ([*k1], "give --yes or --dry-run"),
            ([*k1, "--yes", "--max", "9"], "10 messages match, and at most 9 may"),
            (["topics", "skip-by-filter", topic, "-s", "x", "--key", "k1", "--yes"], "can't be skipped"),
        ):
            result = run(*refused)
            assert (result.returncode, result.stdout) == (1, "")
            assert reason in result.stderr
        with pytest.MonkeyPatch.context() as patch:
            missed = miss_an_outcome(patch)
            assert done(*k1, "--yes", "--timeout", "120") == {"matched": 10, "applied": 19, "tooLate": 0}
        assert missed[0].n_named > 0

        # Of a batch a part can be skipped, but not cancelled.
        left = ("--key", "left", "--yes")
        assert done("topics", "skip-by-filter", topic, "-s", "a", *left)["applied"] == 2
        result = run("topics", "cancel-by-filter", topic, "-s", "x", *left)
        assert (result.returncode, json.loads(result.stdout)) == (
            1,
            {"matched": 2, "applied": 0, "tooLate": 0, "notAllowed": 2},
        )
        assert result.stderr.strip() == "error: 2 of 2 were not done"
        # Over HTTP the same.
        with served(job.settings) as api:
            wait_until(lambda: api.get("/readyz").status_code == 200, 20, "a ready API")
            orders = f"/admin/v2/{topic.replace('://', '/')}"
            body: dict[str, Any] = {"filter": {"key": "k2", "dueBefore": due + 10}}
            for s, operation in (("a", "skip"), ("x", "cancel")):
                answer = api.post(f"{orders}/subscription/{s}/{operation}", json=body, timeout=90)
                assert answer.json() == {"matched": 3, "applied": 3, "tooLate": 0}
            wait_until(lambda: n_pending(key="k2") == 7, 20, "the cancels in the table")
            assert [m["deliverAt"] - due for m in api.get(f"{orders}/delayed?key=k2").json()["messages"]] == [
                *range(11, 30, 3)
            ]
            # What was cancelled is listed, and restored in part: here by the command line, over HTTP.
            rest = ("--admin-url", str(api.base_url))
            cancelled = done(*rest, "pending", topic, "-s", "a", "--key", "k1", "--state", "takenBack")["messages"]
            assert [m["deliverAt"] - due for m in cancelled] == [*range(1, 30, 3)]
            assert done(*rest, "pending", topic, "-s", "a", "--count") == {"count": n_pending(subscription="a")}
            k1_red = ("--key", "k1", "--property", "color=red", "--due-after", str(due + 10), "--yes")
            undone = done(*rest, "topics", "restore-by-filter", topic, "-s", "a", *k1_red)
            assert undone == {"applied": 3, "tooLate": 0, "matched": 3}  # 13, 19, 25
            wait_until(lambda: n_pending(subscription="a", key="k1") == 3, 20, "what was restored in the table")
            # Moved: by the command line over the control topic, and over HTTP.
            move = ("topics", "reschedule-by-filter", topic, "-s", "a", "--key", "k1")
            assert run(*move, "--yes").returncode == 2
            assert done(*move, "--later", "1h", "--yes")["applied"] == 3
            wait_until(lambda: n_pending(subscription="a", due_from=due + 3_600_000) == 3, 20, "moved")
            body = {"filter": {"key": "k1", "dueFrom": due + 3_600_000}, "shiftMillis": -3_600_000}
            answer = api.post(f"{orders}/subscription/a/reschedule", json=body | {"dryRun": True}, timeout=90)
            assert answer.json()["matched"] == 3
            answer = api.post(f"{orders}/subscription/a/reschedule", json=body, timeout=90)
            assert answer.json() == {"matched": 3, "applied": 3, "tooLate": 0}
            body = {"filter": {"key": "k0", "dueFrom": due + 27}}
            answer = api.post(f"{orders}/subscription/a/deliverNow", json=body, timeout=90)
            assert answer.json() == {"matched": 1, "applied": 1, "tooLate": 0}
            # The next one of `a` is m3.
            answer = api.post(
                f"{orders}/subscription/a/skip/1", timeout=90, headers={"Prefer": "return=representation"}
            )
            assert (answer.status_code, answer.json()) == (200, {"applied": 1, "tooLate": 0})
            stats = api.get(f"{orders}/delayed/stats").json()["subscriptions"]
            assert [(s["held"], s["isPaused"]) for s in stats] == [(0, False), (0, False)]
        assert now() < due, "the machine is too slow for this test"

        others = {f"m{i}" for i in range(3, 30, 3)} | {f"m{i}" for i in range(11, 30, 3)}
        restored = {"m13", "m19", "m25"}
        expected = {"a": others - {"m3"} | restored | {"b2", "b3"}, "x": others | {"b0", "b1", "b2", "b3"}}
        wait_until(
            lambda: all(len(collector.received[f"{topic}-{s}"]) >= len(expected[s]) for s in "ax"),
            (due - now()) / 1000 + 60,
            f"what nobody took back\n{job.log}",
        )
        wait_until(lambda: n_pending() == 0, 20, f"nothing pending\n{job.log}")
        for s in "ax":
            assert sorted(m.payload.decode() for m in collector.received[f"{topic}-{s}"]) == sorted(expected[s])
        assert job.terminate() == 0
    finally:
        collector.stop()
        job.stop()
