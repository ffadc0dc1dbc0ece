"""Whether the API runs, and whether it can do anything."""

from __future__ import annotations

from deltalake.exceptions import DeltaError, TableNotFoundError
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from admin.errors import AdminError, error_responses
from admin.policy import open_to_all

router = APIRouter(dependencies=[Depends(open_to_all)])


@router.get("/healthz", summary="The process is up")
async def healthz() -> JSONResponse:
    return JSONResponse({"status": "up"})


@router.get(
    "/readyz",
    summary="The broker is connected and the tables can be read",
    responses=error_responses(_503="Not so; the reason says which."),
)
def readyz(request: Request) -> JSONResponse:
    if not request.app.state.control.is_connected:
        raise AdminError(503, "no connection to the broker")
    try:
        request.app.state.tables.version("entries")
    except TableNotFoundError as error:
        raise AdminError(503, "there are no tables: the job has not run yet") from error
    except (DeltaError, OSError) as error:
        raise AdminError(503, f"the tables can't be read: {type(error).__name__}") from error
    return JSONResponse({"status": "ready"})
