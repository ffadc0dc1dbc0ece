"""Reads a tick's unwritable destinations (`tracker.tick.Tick.unwritable`) as masks of subscriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tracker.dead_letter_targets import dead_letters_of, without_dead_letters
from tracker.in_flight import REJECTED, OpenReleases

Unwritable = Mapping[str, Mapping[str, Any]]
Names = Mapping[str, Sequence[str]]  # by topic: the names of its subscriptions, by number


def held_back(unwritable: Unwritable, names: Names) -> dict[str, int]:
    """Returns by topic, as bits, the unwritable subscriptions whose due messages are held back instead of rejected."""
    return {
        topic: sum(_bit(names, topic, name) for name, one in of_topic.items() if name and "rejects" not in one)
        for topic, of_topic in unwritable.items()
    }


def open_releases(unwritable: Unwritable, names: Names) -> OpenReleases:
    """Returns the releases that have not arrived at some destination, with the subscriptions as bits."""
    return _releases(unwritable, names, "open")


def recalled_releases(unwritable: Unwritable, names: Names) -> OpenReleases:
    """Returns the releases of which nothing was sent to some destination, with the subscriptions as bits."""
    return _releases(unwritable, names, "recalled")


def _releases(unwritable: Unwritable, names: Names, key: str) -> OpenReleases:
    found: dict[tuple[int, int], dict[str, int]] = {}
    for topic, of_topic in unwritable.items():
        for name, one in of_topic.items():
            subscription, is_dead = without_dead_letters(name)
            bit = _bit(names, topic, subscription) if name else REJECTED
            of = dead_letters_of(topic) if is_dead else topic
            for of_tick, kind in one.get(key, ()):
                release = found.setdefault((of_tick, kind), {})
                release[of] = release.get(of, 0) | bit
    return found


def sent_rejects(unwritable: Unwritable, rejects: pa.Table) -> pa.Table:
    """Returns the rejects whose topic for rejects is writable; the others go only to the table `rejects` for now."""
    held = [topic for topic, of_topic in unwritable.items() if "" in of_topic]
    return rejects.filter(pc.invert(pc.is_in(rejects["topic"], pa.array(held, pa.string())))) if held else rejects


def _bit(names: Names, topic: str, name: str) -> int:
    of_topic = list(names.get(topic, ()))
    return 1 << of_topic.index(name) if name in of_topic else 0
