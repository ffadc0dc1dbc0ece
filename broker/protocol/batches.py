"""Finds the messages of many batches at once, without reading one after the other.

A batch has for each message the size of its metadata (4 bytes, big-endian), the metadata, which says how large the
payload is, and the payload. So only who has read a message knows where the next one begins. Here all places that look
like a beginning are read together. Then those count that follow one another, from the batch's first byte to its last:
a payload that looks like a beginning is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from broker.protocol.fields import OF_BATCHED, Bools, Data, Fields, Ints, Spans, read_fields

_SIZE_BYTES = 4
_MOST_CANDIDATES = 4  # so many times as many as there are messages

# What the metadata of a message begins with: the tag of a property, a key, or the payload's size.
_IS_FIRST_TAG = np.zeros(256, np.bool_)
_IS_FIRST_TAG[[1 << 3 | 2, 2 << 3 | 2, 3 << 3]] = True


@dataclass
class Batched:
    """The messages of batches, in their order.

    Attributes:
        is_odd: bool, (batches,): which of them have to be read in another way; none of their messages is here.
        metadata: where the metadata of each message lies.
        payload: where its payload lies.
        fields: of its metadata.
    """

    is_odd: Bools
    metadata: Spans
    payload: Spans
    fields: Fields


def find_messages(data: Data, batches: Spans, counts: Ints) -> Batched:
    """Finds the messages of batches.

    Args:
        data: uint8, (bytes,), with `fields.PADDING` at its end.
        batches: where the payload of each batch lies, decompressed; ascending.
        counts: int64, (batches,): how many messages each says that it has.
    """
    candidates = _candidates(data, batches, int(counts.sum()))
    starts = candidates + _SIZE_BYTES
    ends = starts + (data[candidates + 2].astype(np.int64) << 8 | data[candidates + 3])
    limits = batches.ends[np.searchsorted(batches.ends, candidates, "right")]
    fields = read_fields(data, starts, np.minimum(ends, limits), OF_BATCHED)
    following = ends + fields.payload_size
    following[fields.is_odd | (ends > limits) | (following > limits)] = -1
    messages, is_odd = _chains(candidates, following, batches, counts)
    if len(messages) < len(candidates):
        fields, starts, ends, following = fields.take(messages), starts[messages], ends[messages], following[messages]
    return Batched(is_odd, Spans(starts, ends), Spans(ends, following), fields)


def _candidates(data: Data, batches: Spans, n: int) -> Ints:
    """Returns where messages may begin, ascending; none, if that is nearly everywhere."""
    first, last = int(batches.starts[0]), int(batches.ends[-1]) - _SIZE_BYTES
    if last <= first:
        return np.zeros(0, np.int64)
    # The size of metadata has two bytes at most: larger metadata is odd.
    maybe = np.flatnonzero((data[first:last] == 0) & (data[first + 1 : last + 1] == 0)) + first
    maybe = maybe[_IS_FIRST_TAG[data[maybe + _SIZE_BYTES]]]
    return maybe if len(maybe) <= _MOST_CANDIDATES * n else maybe[:0]


def _chains(candidates: Ints, following: Ints, batches: Spans, counts: Ints) -> tuple[Ints, Bools]:
    """Returns (numbers of the candidates that are messages, which batches are not made of their number of them)."""
    firsts = np.cumsum(counts) - counts
    none_is_odd = np.zeros(len(counts), np.bool_)
    if (
        len(candidates) == counts.sum()
        and (counts > 0).all()
        and (candidates[firsts] == batches.starts).all()
        and (following[firsts + counts - 1] == batches.ends).all()
    ):
        follows = following[:-1] == candidates[1:]
        follows[firsts[1:] - 1] = True  # the next batch may begin elsewhere
        if follows.all():
            return np.arange(len(candidates)), none_is_odd
    place = {at: number for number, at in enumerate(candidates.tolist())}
    found: list[int] = []
    is_odd = ~none_is_odd
    next_of = following.tolist()
    for batch, (at, end, n) in enumerate(
        zip(batches.starts.tolist(), batches.ends.tolist(), counts.tolist(), strict=True)
    ):
        chain: list[int] = []
        while at != end and len(chain) < n and (number := place.get(at)) is not None:
            chain.append(number)
            at = next_of[number]
        if at == end and len(chain) == n > 0:
            found += chain
            is_odd[batch] = False
    return np.array(found, np.int64), is_odd
