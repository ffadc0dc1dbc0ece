"""The request ids that the job gives to outcomes of its own. A command with one would be answered with these."""

from __future__ import annotations

from tracker.properties.retry_of import RETRY_OF

SUPERSEDED_ID = "superseded"  # of all superseded messages

REDRIVE_ID = "redrive-"  # begins the request id of REDRIVE outcomes
NOT_DELIVERED_ID = "not-delivered-"  # begins that of messages which their destination does not take
REBUILD_ID = "rebuild-"  # begins that of what a rebuild has made of other rows

_PREFIXES = (REDRIVE_ID, NOT_DELIVERED_ID, REBUILD_ID)


def is_reserved(request_id: str) -> bool:
    """Whether only the job's own outcomes may have a request id."""
    return request_id in (SUPERSEDED_ID, RETRY_OF) or request_id.startswith(_PREFIXES)
