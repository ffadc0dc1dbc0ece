"""Decompresses entries."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pyarrow as pa

from broker.protocol.wire.pulsar_pb2 import LZ4, NONE, SNAPPY, ZLIB, ZSTD
from conf.errors import DelayLakeError

# Pulsar's LZ4 is a block without a frame, its ZLIB one zlib stream.
_ARROW_CODECS: dict[int, str] = {LZ4: "lz4_raw", ZSTD: "zstd", SNAPPY: "snappy"}


class CompressionError(DelayLakeError):
    """Bytes are not what their metadata says."""


def decompress(data: bytes, compression: int, size: int, max_size: int) -> bytes:
    """Decompresses an entry's payload.

    Args:
        data: the compressed bytes.
        compression: a `Compression` of proto/pulsar.proto.
        size: the number of bytes when decompressed, as the metadata has it.
        max_size: the most bytes that are made; a metadata that names more is refused before anything is allocated.

    Raises:
        CompressionError: the codec is unknown, the size is larger than `max_size`, or the bytes are no such data.
    """
    if compression == NONE:
        return data
    if not 0 <= size <= max_size:
        raise CompressionError(f"it has {size} bytes when decompressed, the most are {max_size}")
    decoder: Callable[[bytes, int], bytes] | None = _zlib if compression == ZLIB else None
    if compression in _ARROW_CODECS:
        codec = pa.Codec(_ARROW_CODECS[compression])

        def decoder(data: bytes, size: int) -> bytes:
            done = bytes(codec.decompress(data, size, asbytes=True)) if size else b""
            if size > 1 and compression != ZSTD and _fits(codec, data, size - 1):
                raise ValueError("it is shorter")  # these codecs leave the rest as it is in memory
            return done

    if decoder is None:
        raise CompressionError(f"its compression {compression} is unknown")
    try:
        done = decoder(data, size)
    except (pa.ArrowException, OSError, ValueError, zlib.error) as error:
        raise CompressionError("it can't be decompressed") from error
    if len(done) != size:
        raise CompressionError(f"it has {len(done)} bytes when decompressed, and not {size}")
    return done


def _fits(codec: pa.Codec, data: bytes, size: int) -> bool:
    """Whether data has so many bytes, or fewer, when decompressed."""
    try:
        codec.decompress(data, size, asbytes=True)
    except (pa.ArrowException, OSError, ValueError):
        return False
    return True


def _zlib(data: bytes, size: int) -> bytes:
    # The Java client does not end its streams: the size alone says whether all is there.
    return zlib.decompressobj().decompress(data, size + 1)  # 0 would mean any number
