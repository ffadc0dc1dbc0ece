"""What can go wrong: a class each, with how often it is drawn. `apply` does it, and ends when the next may come."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import psutil

from tests.chaos.commands import MOST_AHEAD_MILLIS
from tests.chaos.world import CONTROL, DESTINATIONS, OTHER_DESTINATION, PARTS, SECOND, SOURCE, World
from tests.conftest import PROGRAM, RUN_SECONDS
from tests.support.service.harness import Api, now, wait_until

_MOST_PARTITIONS = 8


class Fault(ABC):
    """One kind of fault.

    Attributes:
        weight: how often it is drawn, among all.
        is_survivable: whether nothing may be lost or doubled by it; what is not yet is not drawn unless asked for.
    """

    name: ClassVar[str]
    weight: ClassVar[int]
    is_survivable: ClassVar[bool] = True

    @abstractmethod
    def apply(self, world: World) -> str | None:
        """Does it. Returns why not, where it could not be done."""


def _signal(process: psutil.Process | None, number: signal.Signals) -> str | None:
    if process is None:
        return "no such process runs"
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return "it ended by itself"
    return None


class KillWorker(Fault):
    """One of Spark's Python workers, which may be sending."""

    name, weight = "kill worker", 300

    def apply(self, world: World) -> str | None:
        workers = world.workers()
        return _signal(world.chance.choice(workers) if workers else None, signal.SIGKILL)


class KillMaintenance(Fault):
    name, weight = "kill maintenance", 50

    def apply(self, world: World) -> str | None:
        deadline = time.monotonic() + 8
        while (process := world.maintenance()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(world.chance.uniform(0, 1.5))
        return _signal(process, signal.SIGKILL)


class KillApi(Fault):
    name, weight = "kill API", 40

    def apply(self, world: World) -> str | None:
        if world.api is None:
            world.api = Api(world.job.file)
        world.api.kill()
        world.api = Api(world.job.file)
        return None


class KillDriver(Fault):
    name, weight = "kill driver", 15

    def apply(self, world: World) -> str | None:
        world.job.kill9()
        world.start_job()
        return None


class KillJvm(Fault):
    """Spark's JVM, with the executor in it. Without it the job ends, and whatever watches over it starts it again."""

    name, weight = "kill JVM", 12

    def apply(self, world: World) -> str | None:
        if reason := _signal(world.jvm(), signal.SIGKILL):
            return reason
        process = world.job.process
        assert process is not None
        wait_until(lambda: process.poll() is not None, 60, f"the job's end\n{world.job.log}")
        world.keep_running()
        return None


class KillExecutor(Fault):
    """An executor of a cluster, with its Python workers. Spark starts another one."""

    name, weight = "kill executor", 30

    def apply(self, world: World) -> str | None:
        executors = world.executors()
        if not executors:
            return "there is none without CLUSTER=1"
        executor = world.chance.choice(executors)
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*executor.children(recursive=True), executor]:
                _signal(process, signal.SIGKILL)
        return None


class KillBroker(Fault):
    name, weight = "kill broker", 12

    def apply(self, world: World) -> str | None:
        status = world.broker.status()
        port, http_port = (int(url.rsplit(":", 1)[1]) for url in (status.service_url or "", status.admin_url or ""))
        world.broker.kill()
        time.sleep(world.chance.uniform(0, 4))
        world.broker.start(port=port, http_port=http_port)
        return None


class _Pause(Fault):
    """SIGSTOP, and SIGCONT some time later."""

    longest: ClassVar[float] = 3.0

    def process(self, world: World) -> psutil.Process | None:
        raise NotImplementedError

    def apply(self, world: World) -> str | None:
        process = self.process(world)
        if reason := _signal(process, signal.SIGSTOP):
            return reason
        time.sleep(world.chance.uniform(0.2, self.longest))
        return _signal(process, signal.SIGCONT)


class PauseWorker(_Pause):
    name, weight = "pause worker", 120

    def process(self, world: World) -> psutil.Process | None:
        workers = world.workers()
        return world.chance.choice(workers) if workers else None


class PauseDriver(_Pause):
    name, weight, longest = "pause driver", 50, 6.0

    def process(self, world: World) -> psutil.Process | None:
        return world.driver()


class PauseJvm(_Pause):
    name, weight, longest = "pause JVM", 50, 6.0

    def process(self, world: World) -> psutil.Process | None:
        return world.jvm()


class PauseBroker(_Pause):
    name, weight, longest = "pause broker", 40, 6.0

    def process(self, world: World) -> psutil.Process | None:
        return world.broker_process()


class _Unload(Fault):
    topics: ClassVar[tuple[str, ...]]

    def apply(self, world: World) -> str | None:
        topic = world.chance.choice(self.topics)
        path = topic.replace("://", "/")
        n = world.partitions(topic)
        if n and world.chance.random() < 0.8:
            path = f"{path}-partition-{world.chance.randrange(n)}"
        code = world.put(f"{path}/unload")
        return None if code in (200, 204) else f"the broker answered {code}"


class UnloadSource(_Unload):
    name, weight, topics = "unload source", 100, (SOURCE, SECOND)


class UnloadDestination(_Unload):
    name, weight, topics = "unload destination", 120, tuple(DESTINATIONS.values())


class UnloadControl(_Unload):
    name, weight, topics = "unload control", 50, (CONTROL, f"{CONTROL}_outcomes")


class AddPartition(Fault):
    name, weight = "add partition", 12

    def apply(self, world: World) -> str | None:
        topic = world.chance.choice([SOURCE, SECOND, PARTS, CONTROL])
        n = world.partitions(topic)
        if n >= _MOST_PARTITIONS:
            return "there are enough"
        code = world.put(f"{topic.replace('://', '/')}/partitions", "POST", json=n + 1)
        return None if code in (200, 204) else f"the broker answered {code}"


class LoseCheckpoint(Fault):
    """Killed, the checkpoint gone, rebuilt from the tables."""

    name, weight = "lose checkpoint", 4

    def apply(self, world: World) -> str | None:
        world.job.kill9()
        world.job.stop()
        shutil.rmtree(world.disk / "checkpoint")
        world.job.rebuild()
        world.start_job()
        return None


class FillDisk(Fault):
    """Warehouse and checkpoint can't be written for some seconds."""

    name, weight = "fill disk", 8

    def apply(self, world: World) -> str | None:
        if not world.has_small_disk:
            return "mount is not allowed here"
        ballast = world.disk / "ballast"
        try:
            with open(ballast, "wb") as file, contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, _free(world) - (1 << 16))
            with open(ballast, "ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"0" * 4096)
            time.sleep(world.chance.uniform(1, 8))
        finally:
            ballast.unlink(missing_ok=True)
        return None


def _free(world: World) -> int:
    return shutil.disk_usage(world.disk).free


class RollBackCheckpoint(Fault):
    """A copy of the checkpoint that is some seconds old is put back: the job refuses it, and is rebuilt."""

    name, weight = "roll back checkpoint", 4

    def apply(self, world: World) -> str | None:
        copy = world.folder / "copy"
        world.job.kill9()
        world.job.stop()
        world.copy_checkpoint(copy)
        world.start_job()
        time.sleep(world.chance.uniform(5, 20))
        world.job.kill9()
        world.job.stop()
        shutil.rmtree(world.disk / "checkpoint")
        shutil.copytree(copy, world.disk / "checkpoint")
        refused = subprocess.run(
            [str(PROGRAM), "--config", str(world.job.file), "run"], capture_output=True, text=True, timeout=RUN_SECONDS
        )
        assert refused.returncode == 1, "a checkpoint that went back was taken"
        assert "rebuild" in refused.stderr, refused.stderr
        world.job.rebuild()
        world.start_job()
        return None


class SwapSubscriptions(Fault):
    name, weight = "swap subscriptions", 4

    def apply(self, world: World) -> str | None:
        world.job.kill9()
        world.edit(lambda routes: routes[0]["subscriptions"].reverse())
        world.start_job()
        return None


class AddAndRemoveSubscription(Fault):
    """One is there for some seconds, before all others."""

    name, weight = "add and remove subscription", 3

    def apply(self, world: World) -> str | None:
        world.job.kill9()
        world.edit(lambda routes: routes[0]["subscriptions"].insert(0, {"name": "passing"}))
        world.start_job()
        time.sleep(world.chance.uniform(1, 10))
        world.job.kill9()
        world.edit(lambda routes: routes[0]["subscriptions"].pop(_index(routes[0], "passing")))
        world.start_job()
        return None


class RouteOutAndBack(Fault):
    """A route is missing for one run; what it has waits."""

    name, weight = "route out and back", 3

    def apply(self, world: World) -> str | None:
        taken: list[dict[str, Any]] = []
        world.job.kill9()
        world.edit(lambda routes: taken.append(routes.pop()))
        world.start_job()
        time.sleep(world.chance.uniform(1, 10))
        world.job.kill9()
        world.edit(lambda routes: routes.append(taken[0]))
        world.start_job()
        return None


class CloseDestination(Fault):
    """A destination takes no producer for some seconds: somebody else has the only one that it may have."""

    name, weight = "close destination", 6

    def apply(self, world: World) -> str | None:
        topic = DESTINATIONS["c"]
        path = topic.replace("://", "/")
        code = world.put(f"{path}/maxProducers", "POST", json=1)
        if code not in (200, 204):
            return f"the broker answered {code}"
        try:
            world.put(f"{path}/unload")
            time.sleep(world.chance.uniform(2, 12))
        finally:
            world.put(f"{path}/maxProducers", "DELETE")
        return None


class RemakeDestination(Fault):
    """A destination is terminated, and, when its consumer has all of it, deleted and made anew."""

    name, weight = "remake destination", 4

    def apply(self, world: World) -> str | None:
        if world.is_behind():  # with the topic goes what tells a job that was killed how far it has sent
            return "the job is behind"
        topic = DESTINATIONS["c"]
        path = topic.replace("://", "/")
        code = world.put(f"{path}/terminate", "POST")
        if code not in (200, 204):
            return f"the broker answered {code}"
        time.sleep(world.chance.uniform(2, 8))
        world.wait_until_consumed(topic)
        code = world.put(path, "DELETE", params={"force": "true"})
        assert code in (200, 204, 404), f"the broker answered {code}"
        return None


class PauseSubscription(Fault):
    """A subscription is paused, and resumed some seconds later: other faults may come in between."""

    name, weight = "pause subscription", 25

    def apply(self, world: World) -> str | None:
        topic, name = world.chance.choice([(SOURCE, "a"), (SECOND, "c")])
        is_begun = world.commander.pause(topic, name, world.chance.uniform(1, 15))
        return None if is_begun else "it is paused"


class RenameSubscription(Fault):
    """One has another name for some seconds: it is removed, and another one with its destination added."""

    name, weight = "rename subscription", 3

    def apply(self, world: World) -> str | None:
        if world.is_behind():
            return "the job is behind"

        def rename(before: str, after: str) -> None:
            # The audit counts as lost what was handed out for the one and not sent.
            wait_until(lambda: not world.is_behind(), 300, f"the job has caught up\n{world.job.log}")
            world.job.terminate()
            world.job.stop()
            # What was handed out for the one, and not sent, neither of them gets.
            world.ledger.may_miss("b", now() + MOST_AHEAD_MILLIS)
            world.edit(lambda routes: routes[0]["subscriptions"][_index(routes[0], before)].update(name=after))
            world.start_job()

        rename("b", "renamed")
        time.sleep(world.chance.uniform(1, 10))
        rename("renamed", "b")
        return None


class ChangeDestination(Fault):
    """A subscription has another destination for some seconds."""

    name, weight = "change destination", 3

    def apply(self, world: World) -> str | None:
        if world.is_behind():
            return "the job is behind"
        for destination in (OTHER_DESTINATION, DESTINATIONS["a"]):
            # After a kill, or where the job is behind, what was sent and not written down would go to both.
            wait_until(lambda: not world.is_behind(), 300, f"the job has caught up\n{world.job.log}")
            world.job.terminate()
            world.job.stop()
            world.edit(
                lambda routes, to=destination: routes[0]["subscriptions"][_index(routes[0], "a")].update(destination=to)  # type: ignore[misc]
            )
            world.start_job()
            time.sleep(world.chance.uniform(1, 10))
        return None


def _index(route: dict[str, Any], name: str) -> int:
    return next(i for i, s in enumerate(route["subscriptions"]) if s["name"] == name)


ALL: list[Fault] = [
    kind()
    for kind in (
        KillWorker, KillMaintenance, KillApi, KillDriver, KillJvm, KillExecutor, KillBroker, PauseWorker, PauseDriver,
        PauseJvm, PauseBroker, UnloadSource, UnloadDestination, UnloadControl, AddPartition, LoseCheckpoint, FillDisk,
        RollBackCheckpoint, SwapSubscriptions, AddAndRemoveSubscription, RouteOutAndBack, CloseDestination,
        RemakeDestination, PauseSubscription, RenameSubscription, ChangeDestination,
    )
]  # fmt: skip
