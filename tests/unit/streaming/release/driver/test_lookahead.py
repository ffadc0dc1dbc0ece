"""How far ahead the next batch looks, by what the last ones took."""

from __future__ import annotations

from conf.settings import ReleaseSettings
from streaming.release.driver.lookahead import Lookahead
from tests.support.service.harness import now
from tracker.buckets.time_slots import SLOT_MILLIS

INTERVAL = 600
LIMITS = ReleaseSettings(lookahead_millis=2_000, min_lookahead_millis=300, max_lookahead_millis=20_000)


def measured(lag: int, lead: int, gap: int = 0) -> int:
    """The lookahead after batches that took so long, and jobs; a message was due so long after the last cutoff."""
    lookahead = Lookahead(LIMITS, INTERVAL)
    for _ in range(40):
        at = now() - lag
        lookahead.note_batch(at, at + 1_000, at + 1_000 + gap)
        lookahead.note_spark_job(lead)
    assert lookahead.lead_millis == int(lead * 1.3) + 50
    return lookahead.millis


def test_until_it_is_measured_the_settings_say_it() -> None:
    lookahead = Lookahead(LIMITS, INTERVAL)
    for _ in range(4):
        lookahead.note_batch(now() - 9_000, now(), now())
    lookahead.note_batch(now(), now(), None)
    assert lookahead.millis == 2_000


def test_it_is_the_interval_and_what_batches_and_jobs_take_and_a_slot() -> None:
    needed = INTERVAL + 5_000 + int(400 * 1.3) + 50 + SLOT_MILLIS
    assert needed <= measured(5_000, 400) <= needed + 1_000


def test_what_was_due_just_after_the_last_cutoff_says_it_where_batches_came_less_often() -> None:
    needed = 9_000 + int(400 * 1.3) + 50 + SLOT_MILLIS
    assert needed <= measured(5_000, 400, gap=-4_000) <= needed + 1_000


def test_it_stays_within_its_limits() -> None:
    assert measured(60_000, 400) == 20_000
    assert measured(-60_000, -38, gap=60_000) == 300
