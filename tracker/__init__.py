"""The delayed delivery tracker as plain Python: no Spark, no I/O, no clock of its own.

    from tracker.shard import Shard
    from tracker.store import MemoryStore
    from tracker.tick import Tick, TickInput

    shard = Shard(MemoryStore(), {"persistent://public/default/orders": ["billing"]}, min_index_count_per_bucket=50_000)
    effects = shard.apply(tick, TickInput(messages=rows))

A `Shard` keeps its state in a `Store` and is called once a tick. A `Tick` and a `TickInput` are its whole input,
`Effects` its whole output. docs/glossary.md explains the terms.
"""
