"""The delayed delivery tracker as plain Python: no Spark, no I/O, no clock of its own.

    from tracker import TickInput, MemoryStore, Shard, Tick

    shard = Shard(MemoryStore(), {"persistent://public/default/orders": ["billing"]}, min_index_count_per_bucket=50_000)
    effects = shard.apply(tick, TickInput(messages=rows))

A `Shard` keeps its state in a `Store` and is called once a tick. A `Tick` and a `TickInput` are its whole input,
`Effects` its whole output. docs/glossary.md explains the terms.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracker.in_flight import Release
    from tracker.shard import Shard
    from tracker.store import Key, MemoryStore, Store
    from tracker.subscriptions import Subscriptions
    from tracker.tick import Effects, Tick, TickInput

__all__ = ["Effects", "Key", "MemoryStore", "Release", "Shard", "Store", "Subscriptions", "Tick", "TickInput"]

_MODULES = {
    "Effects": "tracker.tick",
    "TickInput": "tracker.tick",
    "Key": "tracker.store",
    "MemoryStore": "tracker.store",
    "Release": "tracker.in_flight",
    "Shard": "tracker.shard",
    "Store": "tracker.store",
    "Subscriptions": "tracker.subscriptions",
    "Tick": "tracker.tick",
}


def __getattr__(name: str) -> Any:
    """Imports a name of `__all__` when it is first used: code that needs only a constant does not wait for Arrow."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
