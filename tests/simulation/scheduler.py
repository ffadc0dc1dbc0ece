"""One thread in which a seed says who goes on next: virtual time, processes, and stand-ins for threads and clocks.

Each thread of the service is a greenlet. It goes on until it waits: then the scheduler takes the next event, by time,
and among those of one time by the seed. A process that is killed never goes on; one that is paused does later.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Self, TypeVar

import greenlet  # type: ignore[import-untyped]

_T = TypeVar("_T")

_TURN_SECONDS = 0.001  # of a thread that waits for what is there: who goes round and round lets others go on
# Of the wall clock when a simulation begins: 40 s after a full minute, so that windows begin and end within the load.
EPOCH_SECONDS = 1_800_000_040.0
_MONOTONIC_SECONDS = 1_000.0  # of the other one


class Killed(greenlet.GreenletExit):
    """The process of the running thread was killed. No code of the service catches it."""


class TooManyEventsError(Exception):
    """The simulation does not come to its end: something goes round and round."""


@dataclass(eq=False)
class Process:
    """What is killed, and paused, as a whole."""

    name: str
    ahead_seconds: float = 0.0  # by which its machine's wall clock is ahead
    is_dead: bool = False
    is_paused: bool = False
    tasks: dict[Task, None] = field(default_factory=dict)  # in the order of their starts
    missed: list[Callable[[], None]] = field(default_factory=list)  # what came while it was paused


@dataclass(eq=False)
class Task:
    """A thread of a process."""

    process: Process
    name: str
    greenlet: Any = None
    turn: int = 0  # rises with each wait: what was to wake an earlier one does nothing
    is_woken: bool = False  # by somebody, and not because the time was over

    @property
    def is_over(self) -> bool:
        return self.greenlet is None or self.greenlet.dead


class Scheduler:
    """Runs events in the order of their times; events of one time in the order of the seed."""

    def __init__(self, seed: int, most_events: int = 3_000_000) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.n_events = 0
        self.current: Task | None = None
        self._queue: list[tuple[float, float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._most_events = most_events
        self._hub = greenlet.getcurrent()

    @property
    def process(self) -> Process | None:
        """The process of the running thread; None: an event of the world runs."""
        return None if self.current is None else self.current.process

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Lets something happen at a time, or now if that is over."""
        heapq.heappush(self._queue, (max(seconds, self.now), self.random.random(), next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def start(self, process: Process, name: str, work: Callable[[], object]) -> Task:
        """Starts a thread of a process."""
        task = Task(process, name)

        def run() -> None:
            try:
                work()
            except Killed:
                pass
            finally:
                process.tasks.pop(task, None)

        task.greenlet = greenlet.greenlet(run, parent=self._hub)
        process.tasks[task] = None
        self.after(0.0, partial(self._go_on, task, task.turn))
        return task

    def wait(self, seconds: float | None) -> bool:
        """Lets the running thread wait; returns whether it was woken before the time was over; None: it has no end."""
        task = self.current
        assert task is not None, "an event of the world can't wait"
        assert task.greenlet is not None, "nor can a connection's"
        self._check()
        task.turn += 1
        task.is_woken = False
        if seconds is not None:
            self.after(max(seconds, 0.0), partial(self._go_on, task, task.turn))
        self._hub.switch()
        self._check()
        return task.is_woken

    def waker(self) -> Callable[[], None]:
        """Returns what ends the next wait of the running thread."""
        task = self.current
        assert task is not None
        turn = task.turn + 1

        def wake() -> None:
            if task.turn == turn:
                task.is_woken = True
                self.after(0.0, partial(self._go_on, task, turn))

        return wake

    def kill(self, process: Process) -> None:
        """Ends a process at once. If the running thread is of it, this does not return."""
        process.is_dead = True
        if self.process is not None:
            assert self.process is process, "a process kills none but itself"
            self.after(0.0, partial(self._bury, process))
            raise Killed
        self._bury(process)

    def resume(self, process: Process) -> None:
        """Lets a paused process go on."""
        process.is_paused = False
        missed, process.missed = process.missed, []
        for action in missed:
            action()

    def within(self, process: Process, action: Callable[[], object]) -> None:
        """Runs something in a process that waits for nothing; after a pause, where the process is paused."""
        if process.is_paused:
            process.missed.append(partial(self.within, process, action))
        elif not process.is_dead:
            before, self.current = self.current, Task(process, "connection")
            try:
                action()
            finally:
                self.current = before

    def run(self, until: Callable[[], bool]) -> None:
        """Takes one event after the other until something holds, or nothing is left."""
        while self._queue and not until():
            self.n_events += 1
            if self.n_events > self._most_events:
                raise TooManyEventsError(f"after {self.now:.1f} s")
            self.now, _, _, action = heapq.heappop(self._queue)
            action()

    def _go_on(self, task: Task, turn: int) -> None:
        if task.turn != turn or task.is_over or task.process.is_dead:
            return
        if task.process.is_paused:
            task.process.missed.append(partial(self._go_on, task, turn))
            return
        task.turn += 1  # whatever else was to wake it comes too late; `wait` begins another turn
        self.current = task
        try:
            task.greenlet.switch()
        finally:
            self.current = None

    def _bury(self, process: Process) -> None:
        for task in list(process.tasks):
            if task.greenlet:
                self.current = task
                task.greenlet.throw(Killed)
                self.current = None
        process.tasks.clear()

    def _check(self) -> None:
        if self.current is not None and self.current.process.is_dead:
            raise Killed


_active: list[Scheduler] = []


def activate(scheduler: Scheduler | None) -> None:
    """Makes the stand-ins of this module use a scheduler; None: they can't be used."""
    _active[:] = [] if scheduler is None else [scheduler]


def _now() -> Scheduler:
    return _active[0]


class _Waiters:
    """Threads that wait for something; they are woken in the order in which they came."""

    def __init__(self) -> None:
        self._wakers: deque[Callable[[], None]] = deque()

    def wait(self, seconds: float | None) -> bool:
        scheduler = _now()
        wake = scheduler.waker()
        self._wakers.append(wake)
        is_woken = scheduler.wait(seconds)
        if not is_woken and wake in self._wakers:
            self._wakers.remove(wake)
        return is_woken

    def wake(self, n: int | None = None) -> None:
        while self._wakers and n != 0:
            self._wakers.popleft()()
            n = None if n is None else n - 1


class Lock:
    """`threading.RLock`, and in place of `Lock`, too."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._n = 0
        self._waiters = _Waiters()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _now().current
        while self._n and self._owner is not me:
            if not blocking:
                return False
            assert me is not None, "an event of the world waits for a thread"
            if not self._waiters.wait(None if timeout < 0 else timeout) and timeout >= 0:
                return False
        self._owner, self._n = me, self._n + 1
        return True

    def release(self) -> None:
        self._n -= 1
        if not self._n:
            self._owner = None
            self._waiters.wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def free(self) -> int:
        """Gives the lock away, however often its owner has it; returns how often."""
        n, self._n, self._owner = self._n, 0, None
        self._waiters.wake()
        return n

    def take_back(self, n: int) -> None:
        self.acquire()
        self._n = n


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock()
        self._waiters = _Waiters()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        n = self._lock.free()
        try:
            return self._waiters.wait(timeout)
        finally:
            self._lock.take_back(n)

    def wait_for(self, predicate: Callable[[], _T], timeout: float | None = None) -> _T:
        ends_at = None if timeout is None else _now().now + timeout
        while not (result := predicate()):
            left = None if ends_at is None else ends_at - _now().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._waiters.wake()


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters = _Waiters()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiters.wait(timeout)
        elif (task := _now().current) is not None and task.greenlet is not None:
            _now().wait(_TURN_SECONDS)
        return self._is_set


class OrderedSet(dict[Any, None]):
    """In place of `set`, whose order may be that of memory addresses, where the service goes through one."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class Semaphore:
    """`threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._waiters = _Waiters()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        while not self._value:
            if not blocking:
                return False
            self._waiters.wait(timeout)
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        self._waiters.wake(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """`threading.Thread`; the new thread is of the process that starts it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self._work = partial(target or (lambda: None), *args, **(kwargs or {}))
        self._ended = Event()
        self._is_started = False

    def start(self) -> None:
        self._is_started = True
        process = _now().process
        assert process is not None

        def run() -> None:
            try:
                self._work()
            finally:
                self._ended.set()

        _now().start(process, self.name, run)

    def is_alive(self) -> bool:
        return self._is_started and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


class SimpleQueue(Generic[_T]):
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._waiters = _Waiters()

    def put(self, item: _T) -> None:
        self._items.append(item)
        self._waiters.wake(1)

    def get(self, block: bool = True, timeout: float | None = None) -> _T:
        while not self._items:
            if not block or (not self._waiters.wait(timeout) and timeout is not None):
                raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Future(Generic[_T]):
    """`concurrent.futures.Future`."""

    def __init__(self) -> None:
        self._done = Event()
        self._result: _T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future[_T]], object]] = []

    def set_result(self, result: _T) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def add_done_callback(self, callback: Callable[[Future[_T]], object]) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def _end(self) -> None:
        self._done.set()
        for callback in self._callbacks:
            callback(self)

    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> _T:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._done.wait(timeout)
        return self._error


def wait(futures: Iterable[Future[Any]], timeout: float | None = None) -> tuple[set[Future[Any]], set[Future[Any]]]:
    """`concurrent.futures.wait`."""
    asked = list(futures)
    ends_at = None if timeout is None else _now().now + timeout
    for future in asked:
        future._done.wait(None if ends_at is None else max(0.0, ends_at - _now().now))
    return {one for one in asked if one.done()}, {one for one in asked if not one.done()}


class ThreadPoolExecutor:
    """`concurrent.futures.ThreadPoolExecutor` with one thread: what is submitted runs in turn."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "pool") -> None:
        self._name = thread_name_prefix
        self._turn = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass

    def map(self, work: Callable[..., _T], *args: Iterable[Any]) -> list[_T]:
        return [future.result() for future in [self.submit(work, *each) for each in zip(*args, strict=False)]]

    def submit(self, work: Callable[..., _T], *args: Any) -> Future[_T]:
        future: Future[_T] = Future()

        def run() -> None:
            with self._turn:
                try:
                    future.set_result(work(*args))
                except Exception as error:
                    future.set_exception(error)

        Thread(target=run, name=self._name).start()
        return future


class _Module:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def wall_seconds() -> float:
    """The wall clock of the running process's machine, seconds since the epoch; of the world where none runs."""
    process = _now().process
    return EPOCH_SECONDS + _now().now + (0.0 if process is None else process.ahead_seconds)


def _wall_nanos() -> int:
    return round(wall_seconds() * 1e6) * 1_000


def monotonic_seconds() -> float:
    return _MONOTONIC_SECONDS + _now().now


def wait_seconds(seconds: float) -> None:
    """Lets the running thread wait."""
    _now().wait(seconds)


STAND_INS: dict[Any, Any] = {
    time: _Module(
        time,
        time=wall_seconds,
        time_ns=_wall_nanos,
        monotonic=monotonic_seconds,
        perf_counter=monotonic_seconds,
        thread_time=lambda: 0.0,
        sleep=wait_seconds,
    ),
    threading: _Module(
        threading, Lock=Lock, RLock=Lock, Condition=Condition, Event=Event, Semaphore=Semaphore, Thread=Thread
    ),
    queue: _Module(queue, SimpleQueue=SimpleQueue),
}
