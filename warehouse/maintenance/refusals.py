"""Keeps the API's own table `refusals` compact, and deletes its old rows."""

from __future__ import annotations

from deltalake.exceptions import CommitFailedError

from conf.settings import Settings
from warehouse.delta.log_cleanup import shorten_log
from warehouse.delta.opening import open_newest
from warehouse.delta.tables import Tables, exists

REFUSALS = "refusals"


def refusals_need_maintenance(settings: Settings) -> bool:
    """Whether the table has enough files to merge them.

    Raises:
        UnreadableWarehouseError: the table exists and can't be read.
    """
    return exists(settings.warehouse, REFUSALS) and (
        len(open_newest(Tables(settings.warehouse).path(REFUSALS)).file_uris()) >= settings.maintain.min_small_files
    )


def maintain_refusals(settings: Settings, now: int, merges_only: bool = False) -> tuple[int, int, int]:
    """Merges the table's files, deletes rows past their retention, and files that only expired versions need.

    Nobody else changes what is in the table: the API appends.

    Args:
        settings: the settings; the table exists.
        now: the current time, ms since the epoch.
        merges_only: whether to leave out deleting.

    Returns:
        the numbers of files merged, rows deleted, and files deleted; zeros where the API came first.
    """
    table = open_newest(Tables(settings.warehouse).path(REFUSALS))
    deleted = vacuumed = 0
    try:
        if not merges_only:
            oldest = now - settings.retention.refusals_millis
            deleted = int(table.delete(f"refused_at < {oldest}")["num_deleted_rows"])
        merged = int(table.optimize.compact()["numFilesRemoved"])
        if not merges_only:
            hours = -(-settings.maintain.keep_versions_millis // 3_600_000)
            vacuumed = len(table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True))
            shorten_log(table)
    except CommitFailedError:  # the API has appended meanwhile: the next run does it
        return 0, deleted, vacuumed
    return merged, deleted, vacuumed
