"""When the job's subscription went back, and when a broker only lost what was young."""

from __future__ import annotations

from pathlib import Path

from broker.position import Position
from conf.settings import Settings
from streaming.source.watch.subscription_places import PLACES_FILE, SubscriptionPlaces

MINUTE = 60_000


def test_what_a_crash_of_the_broker_may_take_back_is_no_reset(tmp_path: Path) -> None:
    places = SubscriptionPlaces(Settings(checkpoint=str(tmp_path)))
    told = [places.look("t", Position(7, n), n * MINUTE) for n in range(5)]
    assert told == [None] * 5
    assert places.look("t", Position(7, 2), 5 * MINUTE) is None  # entry 2 was acknowledged for two minutes by then
    assert places.look("t", Position(7, 1), 5 * MINUTE) == Position(7, 2)
    assert places.look("t", Position(7, 1), 6 * MINUTE) is None


def test_a_later_run_notices_what_happened_in_between(tmp_path: Path) -> None:
    settings = Settings(checkpoint=str(tmp_path))
    places = SubscriptionPlaces(settings)
    for n in range(3):
        places.look("t", Position(7, 9), n * MINUTE)
        places.look("u", Position(8, n), n * MINUTE)
    places.write()
    following = SubscriptionPlaces(settings)
    assert following.look("u", Position(9, -1), 10 * MINUTE) is None
    assert following.look("t", Position(7, -1), 10 * MINUTE) == Position(7, 9)
    (tmp_path / PLACES_FILE).write_text("[")
    assert SubscriptionPlaces(settings).look("t", Position(7, -1), 10 * MINUTE) is None
