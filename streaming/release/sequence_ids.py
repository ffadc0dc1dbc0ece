"""Assigns sequence ids: the number by which the broker's deduplication knows a message that is sent again."""

from __future__ import annotations

# A producer's sequence id rises from row to row and from tick to tick, and is the same when a release is sent again:
#
#     bit    63   62 ............ 22   21 ............. 0
#          |  0 |        tick        |  place in the tick, + 1  |
#
# The place is the row's in its release, or the outcome's in its tick, from 0 on; 0 in these bits is before the first.
_PLACE_BITS = 22


def sequence_id_of(tick: int, place: int) -> int:
    """Returns the sequence id of a row of a tick's release, or of an outcome of a tick.

    Args:
        tick: its number.
        place: the row's in the release, or the outcome's in the tick, 0 to 2^22 - 2.
    """
    return before_first(tick) + place + 1


def before_first(tick: int) -> int:
    """Returns the number before a tick's first sequence id."""
    return tick << _PLACE_BITS


def last_sequence_id(tick: int) -> int:
    """Returns the last sequence id that anything of a tick can have."""
    return before_first(tick + 1) - 1


def tick_of(sequence_id: int) -> int:
    """Returns the tick of a sequence id; -1 of -1, which a broker says where it knows of none."""
    return sequence_id >> _PLACE_BITS
