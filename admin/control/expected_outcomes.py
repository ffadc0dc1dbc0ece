"""Keeps track of the outcomes of a command that are still to come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from broker.entries.message_ids import MessageRef
from tracker.wire.delaylake_pb2 import ControlOutcome


@dataclass(frozen=True)
class Settled:
    """An outcome as it was published, and the number of its messages, counted for each subscription."""

    published: ControlOutcome
    n_messages: int


class OneByOne:
    """Expects an outcome for each message of each subscription."""

    def __init__(self, messages: Sequence[MessageRef], subscriptions: Sequence[str]) -> None:
        # The (subscription, batch index) of the outcomes still to come, by (ledger, entry).
        self.left: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
        for m in messages:
            self.left[m.ledger_id, m.entry_id].update((name, m.batch_index) for name in subscriptions)

    def settle(self, published: ControlOutcome) -> list[Settled]:
        """Strikes out the messages of an outcome; returns the outcome, which counts as one message here."""
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
        """Strikes out the key of an outcome, or all keys if the outcome has none; returns the outcome."""
        self.left = {
            (name, key)
            for name, key in self.left
            if (published.subscription and name not in ("", published.subscription))
            or published.schedule_key not in ("", key)
        }
        return [Settled(published, 1)]


class SummedUp:
    """Expects outcomes for as many messages or entries as a command names, for each subscription.

    Two outcomes with numbers may be about the same messages. So the outcomes that a repeated command gets in a tick,
    which are all that is known by then, are an answer of their own, and the first complete answer counts.

    Args:
        n: the number of messages or entries that the command names.
        subscriptions: names of the subscriptions.
        batch_size: the number of messages in each of these.
    """

    def __init__(self, n: int, subscriptions: Sequence[str], batch_size: int) -> None:
        self.left = dict.fromkeys(subscriptions, n)  # what is missing in the most complete answer
        self._named = dict(self.left)
        self._batch_size = batch_size
        # The answers to repeats by their time, ms since the epoch; 0: the first answer, which may be published in
        # several ticks.
        self._answers: dict[int, _Answer] = {}

    def settle(self, published: ControlOutcome) -> list[Settled]:
        """Counts off the messages or entries of an outcome; returns the outcomes of its answer if that is complete."""
        answered_at = published.applied_at if published.is_repeat else 0
        answer = self._answers.setdefault(answered_at, _Answer(self._named, self._batch_size))
        answer.take(published)
        self.left = min((one.left for one in self._answers.values()), key=lambda left: sum(left.values()))
        return [] if answer.left else answer.outcomes


class _Answer:
    """An answer to a command whose outcomes are summed up.

    Args:
        named: the number of messages or entries that the command names, by subscription.
        batch_size: the number of messages in each of these.
    """

    def __init__(self, named: dict[str, int], batch_size: int) -> None:
        self.left = named
        self._batch_size = batch_size
        self.outcomes: list[Settled] = []

    def take(self, published: ControlOutcome) -> None:
        names = [n for n in self.left if published.subscription in ("", n) or not n]
        if published.ledger_id >= 0:
            # An outcome of one message of an entry that was named whole: only the last of them ends the entry.
            settled = dict.fromkeys(names, int(not published.has_more))
            n_messages = len(names)
        else:
            # An outcome without a number is for all messages.
            settled = {name: min(published.n_named or self.left[name], self.left[name]) for name in names}
            n_messages = sum(settled.values()) * self._batch_size
        self.left = {n: left for n in self.left if (left := self.left[n] - settled.get(n, 0))}
        self.outcomes.append(Settled(published, n_messages))


def _answers(published: ControlOutcome, subscription: str, batch_index: int) -> bool:
    """Whether an outcome for an entry is the last one for a subscription and one of its messages, or all (-1)."""
    if published.subscription and subscription not in ("", published.subscription):
        return False
    if published.batch_index < 0 or published.batch_index == batch_index:
        return True
    # If the messages of an entry have different results, each has an outcome, and the last one ends the entry.
    return batch_index < 0 and not published.has_more
