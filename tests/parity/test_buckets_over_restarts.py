"""Buckets over restarts, partitions and subscriptions: what Pulsar checks of them end to end, on a shard."""

from __future__ import annotations

from tests.parity.clock import Clock, handed_out
from tests.support.tracker.messages import messages, positions


def test_buckets_outlast_a_restart_and_are_not_sealed_again() -> None:
    """E1: a thousand in buckets are as many after a restart, in the same buckets, and all come."""
    clock = Clock()
    for part in range(10):
        clock.step(part, messages([(1, 100 * part + i, 50_000 + i) for i in range(100)]), seals=True)
    assert sum(bucket.num_rows for bucket in clock.sealed) == 1_000
    before = list(clock.sealed)
    clock.restart()
    status = clock.step(20, seals=True).status
    assert (status["delayed"], status["loaded"]) == (1_000, 0)
    assert clock.sealed == before
    came = [position for t in range(46_000, 50_501, 500) for position in handed_out(clock.step(t))]
    assert sorted(came) == [(1, i) for i in range(1_000)]


def test_another_partition_begins_with_nothing() -> None:
    """E2: what a shard knows of one partition's ledger says nothing of another's, whose entries have the same ids."""
    clock = Clock()
    clock.step(0, messages([(1, i, 9_000) for i in range(10)], partition=0))
    status = clock.step(1, messages([(2, i, 9_000) for i in range(10)], partition=1)).status
    assert status["delayed"] == 20
    again = Clock()
    assert again.step(0).status["delayed"] == 0


def test_counts_tell_what_waits_and_what_of_it_is_loaded() -> None:
    """E4: of six that wait, in buckets and not, more than none and no more than all are loaded, whoever waits."""
    clock = Clock(subscriptions=2)
    clock.step(0, messages([(1, i, 3_000 * (i + 1)) for i in range(6)]))
    status = clock.step(10, seals=True).status
    assert status["delayed"] == 6
    assert 0 < status["loaded"] <= 6


def test_a_message_is_kept_once_however_many_subscriptions_it_has() -> None:
    """E4: Pulsar has an index a subscription, and their sum; here a message waits once, for all of them."""
    clock = Clock(subscriptions=3)
    assert clock.step(0, messages([(1, 1, 500), (1, 2, 500)])).status["delayed"] == 2
    release = clock.step(500).releases[0]
    assert positions(release.rows) == [(1, 1), (1, 2)]
    assert release.rows["subscription_mask"].to_pylist() == [0b111, 0b111]
