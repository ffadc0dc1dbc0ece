"""What a start decides, from facts alone: a table of what may be found, and whether the job goes on from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streaming.checkpoint.checkpoint import OLDEST_VERSION, VERSION, CheckpointError
from streaming.start_checks import (
    CheckpointFacts,
    StartError,
    WarehouseFacts,
    check_no_backup,
    check_not_behind,
    check_program,
    check_tables,
)

RUN_BEFORE = CheckpointFacts(folder="/checkpoint", version=VERSION, has_query=True, shards=2, epoch=3)
NEW = CheckpointFacts(folder="/checkpoint")
REBUILT = CheckpointFacts(folder="/checkpoint", version=VERSION, prepared_shards=2, epoch=3)
TABLES = WarehouseFacts(epoch=3, last_ticks={"deliveries": 7, "entries": -1})

GOES_ON = ""


@pytest.mark.parametrize(
    ("checkpoint", "changes", "error"),
    [
        (NEW, {}, GOES_ON),
        (RUN_BEFORE, {}, GOES_ON),
        (REBUILT, {}, GOES_ON),
        (RUN_BEFORE, {"version": VERSION + 1}, rf"a newer delaylake .*/checkpoint \(version {VERSION + 1}"),
        (RUN_BEFORE, {"version": OLDEST_VERSION}, GOES_ON),
        (RUN_BEFORE, {"version": OLDEST_VERSION - 1}, "an older delaylake .*rebuild --discard-checkpoint"),
        (RUN_BEFORE, {"version": None}, r"an older delaylake .*\(version 1,"),  # 0.1.0 did not say any
        (RUN_BEFORE, {"version": VERSION + 1, "shards": 4}, "a newer delaylake"),  # its shards may mean something else
        (RUN_BEFORE, {"shards": 4}, "of 4 shards, and tracker.shards is 2"),
        (RUN_BEFORE, {"shards": None}, GOES_ON),  # no batch was committed: there is no state
        (REBUILT, {"prepared_shards": 3}, "of 3 shards, and tracker.shards is 2"),
        (RUN_BEFORE, {"prepared_shards": 3}, GOES_ON),  # the state counts: the prepared one is in it
    ],
)
def test_a_program_goes_on_from_a_checkpoint_of_its_version_and_shards(
    checkpoint: CheckpointFacts, changes: dict[str, Any], error: str
) -> None:
    found = replace(checkpoint, **changes)
    if error == GOES_ON:
        check_program(found, 2)
    else:
        with pytest.raises((StartError, CheckpointError), match=error):
            check_program(found, 2)


@pytest.mark.parametrize(
    ("checkpoint", "newest_tick", "tables", "outcome"),
    [
        (NEW, None, {"last_ticks": {}}, "older than the last start .*epoch 0, the warehouse has 3"),
        (NEW, None, {"epoch": 0, "last_ticks": {}}, 1),
        (NEW, None, {"has_messages": True, "last_ticks": {}}, "there is no checkpoint: run `delaylake rebuild`"),
        (REBUILT, None, {"last_ticks": {"deliveries": -1}}, 4),
        (RUN_BEFORE, 7, {}, 4),
        (RUN_BEFORE, 9, {}, 4),  # its last batches have written nothing yet
        (RUN_BEFORE, 6, {}, r"/checkpoint went back: it ends with tick 6, deliveries with 7"),
        (RUN_BEFORE, None, {}, "ends with tick -1, deliveries with 7"),
        (RUN_BEFORE, 7, {"epoch": 2}, 4),  # it crashed between the two writes of a start before
        (RUN_BEFORE, 7, {"epoch": 4}, r"older than the last start .*epoch 3, the warehouse has 4"),
        (RUN_BEFORE, 6, {"epoch": 4}, "older than the last start"),  # that says more than its ticks
    ],
)
def test_a_job_takes_over_tables_that_go_with_its_checkpoint(
    checkpoint: CheckpointFacts, newest_tick: int | None, tables: dict[str, Any], outcome: int | str
) -> None:
    """The outcome is the epoch in which it does, or what is against it."""
    warehouse = replace(TABLES, **tables)
    if isinstance(outcome, int):
        assert check_tables(checkpoint, newest_tick, warehouse) == outcome
    else:
        with pytest.raises((StartError, CheckpointError), match=outcome):
            check_tables(checkpoint, newest_tick, warehouse)


def test_what_topics_have_may_be_as_new_as_the_checkpoint() -> None:
    check_not_behind("/checkpoint", 7, {"orders-a": 7, "outcomes": -1})
    check_not_behind("/checkpoint", None, {})
    with pytest.raises(CheckpointError, match="ends with tick 7, orders-b with 9"):
        check_not_behind("/checkpoint", 7, {"orders-a": 8, "orders-b": 9})


def test_a_backup_is_no_warehouse_to_start_on() -> None:
    check_no_backup("file:/lake", is_backup=False)
    with pytest.raises(StartError, match=r"file:/lake is a backup: run `delaylake rebuild"):
        check_no_backup("file:/lake", is_backup=True)
