"""Makes a warehouse of a backup: sets its tables back to the marker's versions."""

from __future__ import annotations

from deltalake import DeltaTable

from conf.errors import DelayLakeError
from warehouse.backup.copying import CHOSEN, RESTORED, change_to, files_of, imports_of
from warehouse.backup.marker import Marker, read_marker
from warehouse.delta.commits import mend_log
from warehouse.delta.opening import open_newest
from warehouse.delta.tables import Tables, exists


class NeverCompleteError(DelayLakeError):
    """No run of a backup has been completed. The message is one line."""


def restore(warehouse: str) -> Marker | None:
    """Brings the tables of a backup to the versions of its last complete run; backups refuse to write there afterwards.

    The place stays a backup until `remove_marker`; if the program ends before that, call this again.

    Returns:
        the backup's marker; None: the warehouse is no backup, and nothing was changed.

    Raises:
        NeverCompleteError: there is no complete run.
        NotABackupError: the marker can't be read.
        CommitFailedError: a backup writes the tables now.
    """
    marker = read_marker(warehouse)
    if marker is None:
        return None
    if not marker.made_at:
        raise NeverCompleteError(f"the backup in {warehouse} was never completed: use another one")
    tables = Tables(warehouse)
    for name in CHOSEN:
        mend_log(tables.path(name))  # first: nobody can read a table with a torn commit, or a version with a wrong hint
        if not exists(warehouse, name):
            continue
        path, version = tables.path(name), marker.tables.get(name)
        then = None if version is None else DeltaTable(path, version=version)
        newest = open_newest(path)
        # A later run that was broken off may have copied transactions of imports whose rows go now.
        imports = dict.fromkeys(imports_of(newest), -1) | ({} if then is None else imports_of(then))
        change_to(newest, {} if then is None else files_of(then), imports | {RESTORED: marker.made_at})
    return marker
