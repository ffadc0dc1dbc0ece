"""Reminders over HTTP: set one for a time, put it off, take it back. `uvicorn fastapi_reminders:app`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, HTTPException, Query, Request
from pydantic import AwareDatetime, BaseModel

from delaylake import AsyncClient, NotFound, TooLate

TOPIC = os.environ.get("REMINDERS_TOPIC", "reminders")


class Reminder(BaseModel):
    """A reminder that was set. Whoever takes it back names both: keep them together."""

    id: str
    at: AwareDatetime


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    url = os.environ.get("DELAYLAKE_URL", "http://127.0.0.1:8081")
    broker = os.environ.get("PULSAR_URL", "pulsar://localhost:6650")
    async with AsyncClient(url, broker=broker) as app.state.lake:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/reminders", status_code=201)
async def remind(request: Request, text: str, at: Annotated[AwareDatetime, Query()]) -> Reminder:
    message = await request.app.state.lake.schedule(TOPIC, text, at=at)
    return Reminder(id=str(message), at=message.deliver_at)


@app.put("/reminders/{id}")
async def put_off(request: Request, id: str, at: Annotated[AwareDatetime, Query()]) -> Reminder:
    await _change(request.app.state.lake.reschedule(TOPIC, id, at=at))
    return Reminder(id=id, at=at)


@app.delete("/reminders/{id}", status_code=204)
async def take_back(request: Request, id: str, at: Annotated[AwareDatetime, Query()]) -> None:
    await _change(request.app.state.lake.cancel(TOPIC, id, deliver_at=at))


async def _change(command: Awaitable[object]) -> None:
    try:
        await command
    except TooLate as error:
        raise HTTPException(409, "it is on its way already") from error
    except (NotFound, ValueError) as error:
        raise HTTPException(404, "no such reminder") from error
