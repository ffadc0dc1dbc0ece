"""What all parts of a rebuild go by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from broker.position import Position
from conf.settings import Settings
from warehouse.delta.tables import OnProgress, Tables
from warehouse.renumber_message_ids import Renumbering
from warehouse.routes.known_routes import subscription_names


@dataclass(frozen=True)
class Reports:
    """Who hears how far a rebuild is, and what somebody has to look at.

    Attributes:
        on_progress: called with (table, step, number of rows).
        on_warning: called with one line.
    """

    on_progress: OnProgress = lambda table, step, rows: None
    on_warning: Callable[[str], None] = lambda text: None


SILENT = Reports()


@dataclass(frozen=True)
class DestinationReading:
    """How destinations are read.

    Attributes:
        without: destinations that are not to be read; each that would be needed is a warning.
        renumbering: of the tables, which the destinations do not have yet; None: the tables were not renumbered now.
            Messages from before an earlier renumbering are left out, because their ids are of another broker.
    """

    without: Collection[str] = ()
    renumbering: Renumbering | None = None


ALL_DESTINATIONS = DestinationReading()


@dataclass(frozen=True)
class RebuildContext:
    """The warehouse that a rebuild reads, and the time at which it does.

    Attributes:
        settings: of the job.
        known: the settings with the missing routes, whose messages continue to wait.
        tables: of the warehouse, taken over.
        durable: the last entry of each topic partition that does not come again from the source topics.
        now: ms since the epoch.
        reports: hear of it.
        names: the names of each source topic's subscriptions, in the order of their numbers.
    """

    settings: Settings
    known: Settings
    tables: Tables
    durable: Mapping[str, Position]
    now: int
    reports: Reports = SILENT
    names: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", subscription_names(self.known))
