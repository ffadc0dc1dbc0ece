"""A real broker while a block runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from broker.standalone import EmbeddedBroker


@contextmanager
def running_broker(folder: Path, conf: Mapping[str, str] | None = None) -> Iterator[EmbeddedBroker]:
    """Starts a broker on free ports, and kills it at the end.

    Args:
        folder: of its data.
        conf: settings of `standalone.conf`.
    """
    made = EmbeddedBroker(folder, conf)
    try:
        made.start(port=0, http_port=0)
        yield made
    finally:
        made.kill()
