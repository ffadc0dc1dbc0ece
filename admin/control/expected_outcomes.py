"""Which outcomes of a command are still to come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from broker.entries.message_ids import MessageRef
from tracker.wire.delaylake_pb2 import ControlOutcome


@dataclass(frozen=True)
class Settled:
    """An outcome as it was published, and of how many messages it is, counted for each subscription."""

    published: ControlOutcome
    n_messages: int


class OneByOne:
    """Expects an outcome for each message of each subscription."""

    def __init__(self, messages: Sequence[MessageRef], subscriptions: Sequence[str]) -> None:
        # For each entry, (ledger, entry), the subscription and batch index of the outcomes that are to come.
        self.left: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
        for m in messages:
            self.left[m.ledger_id, m.entry_id].update((name, m.batch_index) for name in subscriptions)

    def settle(self, published: ControlOutcome) -> list[Settled]:
        """Strikes out the messages that an outcome is of, which here counts as 1; returns it."""
        entries = list(self.left) if published.ledger_id < 0 else [(published.ledger_id, published.entry_id)]
        for entry in entries:
            left = {key for key in self.left.pop(entry, ()) if not _answers(published, *key)}
            if left:
                self.left[entry] = left
        return [Settled(published, 1)]


class ByKey:
    """Expects an outcome for each schedule key of each subscription."""

    def __init__(self, keys: Sequence[str], subscriptions: Sequence[str]) -> None:
        self.left = {(name, key) for name in subscriptions for key in keys}

    def settle(self, published: ControlOutcome) -> list[Settled]:
        """Strikes out the key that an outcome is of, or all where it is of none; returns the outcome."""
        self.left = {
            (name, key)
            for name, key in self.left
            if (published.subscription and name not in ("", published.subscription))
            or published.schedule_key not in ("", key)
        }
        return [Settled(published, 1)]


class SummedUp:
    """Expects outcomes for as many messages or entries as a command names, for each subscription.

    Of a number nobody can tell whether the messages of another one are in it. So what a tick tells a repeated command,
    which is all that is known of it, is an answer of its own, and the first one that is whole counts.

    Args:
        n: how many messages or entries the command names.
        batch_size: how many messages each of these has.
    """

    def __init__(self, n: int, subscriptions: Sequence[str], batch_size: int) -> None:
        self.left = dict.fromkeys(subscriptions, n)  # of the answer that has most
        self._named = dict(self.left)
        self._batch_size = batch_size
        # By when it was told, ms since the epoch, the answer to a repeat; 0: the first answer, whose parts may be told
        # in several ticks.
        self._answers: dict[int, _Answer] = {}

    def settle(self, published: ControlOutcome) -> list[Settled]:
        """Counts off the messages or entries that an outcome is of; returns the outcomes of an answer that is whole."""
        told_at = published.applied_at if published.is_repeat else 0
        answer = self._answers.setdefault(told_at, _Answer(self._named, self._batch_size))
        answer.take(published)
        self.left = min((one.left for one in self._answers.values()), key=lambda left: sum(left.values()))
        return [] if answer.left else answer.told


class _Answer:
    """An answer to a command whose outcomes are summed up.

    Args:
        named: by subscription how many messages or entries the command names.
        batch_size: how many messages each of these has.
    """

    def __init__(self, named: dict[str, int], batch_size: int) -> None:
        self.left = named
        self._batch_size = batch_size
        self.told: list[Settled] = []

    def take(self, published: ControlOutcome) -> None:
        names = [n for n in self.left if published.subscription in ("", n) or not n]
        if published.ledger_id >= 0:
            # It is of one of the messages of an entry that was named whole: only the last of them ends the entry.
            settled = dict.fromkeys(names, int(not published.has_more))
            n_messages = len(names)
        else:
            # An outcome without a number is of all.
            settled = {name: min(published.n_named or self.left[name], self.left[name]) for name in names}
            n_messages = sum(settled.values()) * self._batch_size
        self.left = {n: left for n in self.left if (left := self.left[n] - settled.get(n, 0))}
        self.told.append(Settled(published, n_messages))


def _answers(published: ControlOutcome, subscription: str, batch_index: int) -> bool:
    """Whether an outcome for an entry is the last for one of its messages, or for all of it (-1), of a subscription."""
    if published.subscription and subscription not in ("", published.subscription):
        return False
    if published.batch_index < 0 or published.batch_index == batch_index:
        return True
    # Where an entry's messages do not share a result, each has an outcome, and the last of them ends the entry.
    return batch_index < 0 and not published.has_more
