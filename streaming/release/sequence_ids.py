"""Assigns sequence ids, by which the broker's deduplication recognizes a message that is sent again."""

from __future__ import annotations

# A producer's sequence ids rise from row to row and from tick to tick, and are the same when a release is sent again:
#
#     bit    63   62 ............ 22   21 ............. 0
#          |  0 |        tick        |  place in the tick, + 1  |
#
# The place is that of a row in its release, or of an outcome in its tick, from 0 on. Bits 0 are before the first place.
_PLACE_BITS = 22


def sequence_id_of(tick: int, place: int) -> int:
    """Returns the sequence id of a row of a tick's release, or of an outcome of a tick.

    Args:
        tick: of the release, or of the outcome.
        place: of the row in the release, or of the outcome in the tick, 0 to 2^22 - 2.

    Raises:
        OverflowError: the place is beyond that: the id would be one of the next tick.
    """
    if not 0 <= place < (1 << _PLACE_BITS) - 1:
        raise OverflowError(f"tick {tick} has no sequence id for place {place:,}")
    return before_first(tick) + place + 1


def before_first(tick: int) -> int:
    """Returns the number before a tick's first sequence id."""
    return tick << _PLACE_BITS


def last_sequence_id(tick: int) -> int:
    """Returns the highest possible sequence id of a tick."""
    return before_first(tick + 1) - 1


def tick_of(sequence_id: int) -> int:
    """Returns the tick of a sequence id; -1 for -1, with which a broker says that it knows no sequence id."""
    return sequence_id >> _PLACE_BITS
