"""What a paused schedule has waiting is pending, and not held back: nothing is missing that it waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.commands.messages.pending import messages_text
from tests.support.warehouse.schedule_tables import NINE, TOPIC, ScheduleTables
from tracker.message_state.changes import HELD_DELIVER_AT, PAUSED_DELIVER_AT
from warehouse.queries.listing import PendingFilter, State
from warehouse.queries.pending_messages import Pending
from warehouse.views import Warehouse


@pytest.mark.slow
def test_it_is_told_from_what_is_held_back_wherever_that_is_counted_and_listed(tmp_path: Path) -> None:
    tables = ScheduleTables(tmp_path, ("a",))
    for entry, at in ((1, HELD_DELIVER_AT), (2, PAUSED_DELIVER_AT)):
        tables.came(entry)
        tables.waits("a", entry, 1, at, sequence=5, by_rule=NINE)
        tables.moved("a", entry, at, sequence=5)
    asked = Pending(tables.settings, TOPIC, PendingFilter(), None, NINE)
    (stats,) = asked.stats()["subscriptions"]
    assert (stats["pending"], stats["held"], stats["earliest"], stats["latest"]) == (2, 1, None, None)
    listed = asked.page(9).to_json()["messages"]
    assert [(m["entryId"], m["deliverAt"], m["isHeld"], m["isPaused"]) for m in listed] == [
        (1, None, True, False),
        (2, None, False, True),
    ]
    held = Pending(tables.settings, TOPIC, PendingFilter(state=State.HELD), None, NINE)
    assert ([m.ref.entry_id for m in held.page(9).messages], held.count()) == ([1], 1)
    assert [line.split("  ")[0] for line in messages_text(listed).splitlines()[-2:]] == ["held back", "paused"]
    views = Warehouse(tables.settings)
    rows = views.sql("SELECT entry_id, is_held, is_paused FROM pending ORDER BY entry_id").to_pylist()
    assert [tuple(row.values()) for row in rows] == [(1, True, False), (2, False, True)]
    assert views.sql("SELECT * FROM schedule").num_rows == 0
