"""Routes for the health of the API and of the job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from deltalake.exceptions import DeltaError, TableNotFoundError
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import State

from admin.errors import AdminError, error_responses
from admin.security.policy import open_to_all
from conf.errors import UnreadableWarehouseError
from status.job_status import read_status

_SECONDS = 1.0

_T = TypeVar("_T")


class Memory(Generic[_T]):
    """Remembers what a function returned or raised, for a second.

    Args:
        make: called in a thread, by one caller at a time.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._made_at = -_SECONDS
        self._made: _T | Exception | None = None

    async def get(self) -> _T:
        """Returns what the function returned within the last second, or now; raises what it raised."""
        if not self._is_fresh:
            async with self._lock:
                if not self._is_fresh:
                    try:
                        self._made = await asyncio.to_thread(self._make)
                    except Exception as error:
                        self._made = error
                    self._made_at = time.monotonic()
        if isinstance(self._made, Exception):
            raise self._made
        return self._made  # type: ignore[return-value]

    @property
    def _is_fresh(self) -> bool:
        return time.monotonic() - self._made_at < _SECONDS


router = APIRouter(dependencies=[Depends(open_to_all)])


@router.get("/healthz", summary="The process is up")
async def healthz() -> JSONResponse:
    return JSONResponse({"status": "up"})


@router.get(
    "/readyz",
    summary="The broker is connected and the tables can be read; and whether the job does its work",
    description="`job` is for people: the state of the job does not make the API unready.",
    responses=error_responses(_503="The broker is not connected, or the tables can't be read; the reason says which."),
)
async def readyz(request: Request) -> JSONResponse:
    return JSONResponse(await remembered(request.app.state, "readiness", _readiness).get())


def _readiness(state: State) -> dict[str, Any]:
    """Returns the content of the answer of /readyz.

    Raises:
        AdminError: 503, the API is not ready.
    """
    if not state.control.is_connected:
        raise AdminError(503, "no connection to the broker")
    try:
        state.tables.version("entries")
    except TableNotFoundError as error:
        raise AdminError(503, "there are no tables: the job has not run yet") from error
    except (DeltaError, OSError) as error:
        raise AdminError(503, f"the tables can't be read: {type(error.__cause__ or error).__name__}") from error
    status, trouble = None, "the job has written no status"
    try:
        status = read_status(state.settings.warehouse)
    except UnreadableWarehouseError:
        trouble = "the job's status can't be read"
    now = time.time_ns() // 1_000_000
    job = {
        "state": "unknown" if status is None else status.state,
        "trouble": trouble if status is None else status.trouble(now),
        "ageMillis": None if status is None else now - status.updated_at,
    }
    return {"status": "ready", "job": job}


@router.get("/metrics", summary="Figures of the API and of the job, for Prometheus", response_class=Response)
async def metrics(request: Request) -> Response:
    made = await remembered(request.app.state, "figures", lambda state: generate_latest(state.metrics.registry)).get()
    return Response(made, media_type=CONTENT_TYPE_LATEST)


def remembered(state: State, name: str, make: Callable[[State], _T]) -> Memory[_T]:
    """Returns the application's memory of an answer, by name."""
    if not hasattr(state, name):
        setattr(state, name, Memory(partial(make, state)))
    memory: Memory[_T] = getattr(state, name)
    return memory
