"""How a batch's room is shared among topic partitions."""

from __future__ import annotations

from broker.position import START, Position
from conf.settings import Settings
from streaming.release.feedback import Feedback
from streaming.source.batch_shares import MAX_DISPATCHED_BYTES, BatchShares, Waiting, is_too_much
from streaming.source.clock import MAX_LARGE_BYTES
from tracker.schemas import MAX_ANSWERS

MIB = 1 << 20


class Receiver:
    """With a backlog of chunks of some size, of which it gives at least one where there is room."""

    def __init__(self, chunks: int, chunk_bytes: int = MIB) -> None:
        self.left, self.chunk_bytes, self.taken = chunks, chunk_bytes, 0

    @property
    def waiting_bytes(self) -> int:
        return self.left * self.chunk_bytes

    def take_into_batch(
        self, max_messages: int, max_bytes: int, up_to: Position | None = None
    ) -> tuple[Position, int, int]:
        self.max_bytes = max_bytes
        n = min(self.left, max(1, max_bytes // self.chunk_bytes)) if max_bytes > 0 < max_messages else 0
        self.left, self.taken = self.left - n, self.taken + n
        return Position(1, self.taken) if self.taken else START, n, n * self.chunk_bytes


def shares(subscriptions: int = 1) -> BatchShares:
    names = [{"name": f"s{i}"} for i in range(subscriptions)]
    routes = [{"source": "persistent://public/default/orders", "subscriptions": names}]
    return BatchShares(Settings(routes=routes))  # type: ignore[arg-type]


def test_partitions_with_much_take_turns_and_those_with_little_never_wait() -> None:
    much = {f"much{i}": Receiver(100) for i in range(60)}
    little = {f"little{i}": Receiver(0, 1_000) for i in range(3)}
    waiting = [Waiting(name, receiver, False) for name, receiver in (much | little).items()]
    of = shares()
    for tick in range(1, 9):
        for receiver in little.values():
            receiver.left = 5
        before = sum(receiver.taken for receiver in much.values())
        ends = of.take(tick, waiting, {}, 1, Feedback())
        assert sum(receiver.taken for receiver in much.values()) - before <= 17, "a batch has no more than its bytes"
        assert all(receiver.left == 0 for receiver in little.values())
        assert ends["little0"] == Position(1, 5 * tick)
    taken = [receiver.taken for receiver in much.values()]
    assert (min(taken), max(taken)) == (2, 3)


def test_one_partition_alone_has_the_whole_batch() -> None:
    alone = Receiver(100)
    shares().take(1, [Waiting("alone", alone, False)], {}, 1, Feedback())
    assert alone.taken == 16


def test_with_much_on_its_way_a_batch_takes_little_and_at_last_nothing() -> None:
    alone = Receiver(100)
    feedback = Feedback(in_flight_bytes=MAX_DISPATCHED_BYTES, large_bytes=5 * MIB)
    shares().take(1, [Waiting("alone", alone, False)], {}, 1, feedback)
    assert alone.taken == 1
    assert not is_too_much(feedback)
    assert is_too_much(Feedback(in_flight_bytes=2 * MAX_DISPATCHED_BYTES + 1))


def test_commands_come_first_and_are_so_few_that_a_tick_can_answer_them() -> None:
    control, much = Receiver(100, 10_000), Receiver(100)
    waiting = [Waiting("much", much, False), Waiting("control", control, True)]
    shares(subscriptions=10).take(1, waiting, {"control": Position(1, 50)}, 2, Feedback())
    assert control.max_bytes == MAX_ANSWERS // 20
    assert much.taken == 15


def test_what_others_send_goes_on_at_full_speed_while_large_messages_wait() -> None:
    assert Settings().ingest.max_bytes_per_batch <= MAX_DISPATCHED_BYTES - MAX_LARGE_BYTES
