"""The end of a batch, as Spark's offset log has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tracker.buckets.large_rows import MAX_ID, LargeKey, LargeRows
from tracker.shaping.token_bucket import SHAPED, recorded
from tracker.tick import Tick
from warehouse.routes.known_routes import KnownRoutes

# Fields of `Offset` that have another name in Spark's offset log: a checkpoint outlives a renaming.
_STORED_AS = {
    "seal_epoch": "turn",
    "run_id": "run",
    "durable_through": "booked",
    "ingested_through": "passed",
    "reinstated": "back",
}
_READ_AS = {stored: name for name, stored in _STORED_AS.items()}

# Fields that offsets of earlier programs lack, which mean nothing when they are empty.
_NEWER = {
    *("drains", "drained_before", "large", "max_bytes", "max_delay_millis", "max_file_bytes", "newly_keyed"),
    "rejects_to",
}

UNKNOWN = -1  # in place of a topic's number of partitions: the topic was never looked up


@dataclass(frozen=True, kw_only=True)
class Offset:
    """The end of a batch in Spark's offset log. The result of a batch is a function of its offsets and the state.

    Fields of the same name mean the same as in `tracker.tick.Tick`. An offset with tick 0 is before the first batch.

    Attributes:
        marks: seal epochs that are not durable yet, each as [number, tick, time]; messages that were due before that
            time, ms since the epoch, were not sealed, and are dispatched by that tick if they wait for a place.
        lanes: as `release.lanes` in the settings.
        batch_millis: as `release.batch_millis` in the settings.
    """

    tick: int = 0
    now: int = 0
    cutoff: int = 0
    seal_epoch: int = 0
    load_horizon: int = 0
    near_until: int = 0
    run_id: str = ""
    confirmed: int = 0
    durable_through: int = 0
    marks: list[list[int]] = field(default_factory=list)
    index_version: int = 0  # the version of delayed_index that segments are loaded from
    lookup_versions: list[int] = field(default_factory=list)  # of the tables index_rows.LOOKED_UP; []: no commands
    barriers: list[Any] = field(default_factory=list)  # [tick, ends of the source topics when its commands were read]
    ingested_through: int = 0  # the barriers of this tick and earlier ones have been passed
    positions: dict[str, str] = field(default_factory=dict)  # the last entry ingested, by topic partition
    destinations: dict[str, int] = field(default_factory=dict)  # number of partitions of the partitioned ones, UNKNOWN
    lanes: int = 1
    batch_millis: int = 0
    routes: dict[str, Any] = field(default_factory=dict)  # as `KnownRoutes` has them
    reinstated: list[list[str]] = field(default_factory=list)  # [topic, subscription or ""] that get messages again
    # The version of delayed_index with the messages parked for them, and for `drains`; 0: index_version
    held_version: int = 0
    unwritable: dict[str, dict[str, Any]] = field(default_factory=dict)  # as in `Feedback`
    # Resumed subscriptions, and slow recipients, that get some of the messages parked for them: by source topic and
    # subscription the most of them. And for resumed ones a time, ms since the epoch, before which none of them was due.
    drains: dict[str, dict[str, int]] = field(default_factory=dict)
    drained_before: dict[str, dict[str, int]] = field(default_factory=dict)
    # By source topic whose rejects topic lacks some: the first tick whose rejects it lacked.
    rejects_since: dict[str, int] = field(default_factory=dict)
    # [tick, ledger id, entry id] of the last of them that has been sent again, by source topic; without it none has.
    rejects_to: dict[str, list[int]] = field(default_factory=dict)
    rejects_version: int = 0  # the version of rejects with those that are sent again in this tick
    changed: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # subscriptions, as `warehouse.routes.membership.Changes`
    keyed: list[str] = field(default_factory=list)  # source topics that have had messages with a schedule key
    # Those whose first such message is in this batch, where there are several shards: their waiting commands are handed
    # to all shards, in the version of `outcomes` that `lookup_versions` has.
    newly_keyed: list[str] = field(default_factory=list)
    # [time, number of places of each shard], by source topic and subscription: places after that time, ms since the
    # epoch, for shaped messages that waited for this tick.
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    time_zone_data: str = ""  # version of the time zones for recurring messages; "": the offset of an earlier program
    large: dict[str, Any] = field(default_factory=dict)  # as `LargeRows.to_json`; empty: of an earlier program
    max_bytes: int = 0  # as in `tracker.tick.Tick`; 0: the offset of an earlier program
    max_file_bytes: int = 0  # likewise
    max_delay_millis: int = 0  # as `tracker.max_delay_millis` in the settings; commands name no later times
    lane_set: int = 0  # how often the clock was set back: messages from before may wait in their lanes for long

    @property
    def known_routes(self) -> KnownRoutes:
        """The routes when the batch was made; empty before the first batch."""
        return KnownRoutes.from_json(self.routes)

    @property
    def large_rows(self) -> LargeRows:
        """Which large rows are in state after the batch."""
        return LargeRows.from_json(self.large)

    @property
    def large_to(self) -> LargeKey:
        """The last key of a large row that may be in state after the batch."""
        return self.large_rows.after or (self.load_horizon - 1, MAX_ID, MAX_ID)

    @property
    def parked_rejects(self) -> list[str]:
        """The source topics whose rejects are sent again after the batch, in rounds."""
        return sorted(self.rejects_since)

    @property
    def newest_ledgers(self) -> dict[str, int]:
        """By source topic the newest ledger when the batch's commands had come, where the broker told it."""
        ends: dict[str, str | None] = next((ends for tick, ends in self.barriers if tick == self.tick), {})
        known = self.known_routes.routes
        newest: dict[str, int] = {}
        unknown: set[str] = set()
        for name, position in [*self.positions.items(), *ends.items()]:
            topic = name if name in known else name.rpartition("-partition-")[0]
            if position is None:
                unknown.add(topic)
            else:
                newest[topic] = max(newest.get(topic, -1), int(position.split(":")[0]))
        return {topic: ledger for topic, ledger in newest.items() if topic not in unknown}

    def to_json(self) -> dict[str, Any]:
        """Returns the offset for Spark's offset log. Spark compares offsets as text, so the order of keys is fixed.

        The values are the offset's own: nobody changes them.
        """
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        # An offset of an earlier program stays as it was: the name of its batch's input is a hash of it.
        own = {name: value for name, value in own.items() if value or name not in _NEWER}
        return {
            **{_STORED_AS.get(name, name): value for name, value in own.items()},
            "positions": dict(sorted(self.positions.items())),
            "destinations": dict(sorted(self.destinations.items())),
        }

    @classmethod
    def from_json(cls, offset: Mapping[str, Any]) -> Offset:
        """Reads an offset that `to_json` wrote."""
        return cls(**{_READ_AS.get(name, name): value for name, value in offset.items()})

    def to_tick(self) -> Tick:
        """Returns the tick of the batch that ends with this offset, as the shards get it."""
        routes = self.known_routes
        sending: dict[str, Any] = {
            "lanes": self.lanes,
            "lane_set": self.lane_set,
            "partitions": self.destinations,
            "batch_millis": self.batch_millis,
            "routes": routes.destinations,
        }
        if routes.shaping:
            sending[SHAPED] = recorded(self.now, routes.shaping)
        if attempts := routes.attempts:
            sending["attempts"] = attempts
        return Tick(
            tick=self.tick,
            cutoff=self.cutoff,
            seal_epoch=self.seal_epoch,
            load_horizon=self.load_horizon,
            near_until=self.near_until,
            run_id=self.run_id,
            confirmed=self.confirmed,
            durable_through=self.durable_through,
            now=self.now,
            ingested_through=self.ingested_through,
            sending=json.dumps(sending, sort_keys=True),
            unwritable=self.unwritable,
            max_bytes=self.max_bytes,
            max_file_bytes=self.max_file_bytes,
            large=self.large,
            drains=self.drains,
            places=self.places,
            parked_rejects=self.parked_rejects,
        )
