"""The steps of clients/contract.json, which all clients pass: how the Python client does each."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from delaylake import Client, DelayLakeError, MessageId, NotFound, Outcome
from delaylake.testing import FakeClient
from delaylake.times import millis, moment

_FILE = Path(__file__).parents[3] / "clients/contract.json"
_LISTED_SECONDS = 150.0  # until the tables have what was sent, on whatever machine

Lake = Client | FakeClient
Step = dict[str, Any]


def check(
    connect: Callable[[str | None], Lake],
    topic: str,
    now: Callable[[], datetime],
    leaves_out: frozenset[str] = frozenset(),
    before_step: Callable[[], object] = bool,
) -> int:
    """Does the steps one after the other.

    Args:
        connect: returns a client with a wrong token, or with None with the right one.
        topic: a source topic that nobody else uses; `<topic>_unknown` has no route.
        leaves_out: values of `over` whose steps are left out.
        before_step: called before each step.

    Returns:
        the number of steps done.

    Raises:
        AssertionError: an answer differs.
    """
    messages: dict[str, MessageId] = {}
    steps = [step for step in json.loads(_FILE.read_text()) if step.get("over") not in leaves_out]
    for step in steps:
        before_step()
        answer, outcomes, error = _settled(connect(step.get("token")), step, topic, messages, now)
        assert (type(error).__name__ if error else None) == step.get("error"), f"{step['title']}: {error!r} {answer}"
        if "outcomes" in step:
            assert {one.subscription: one.result for one in outcomes} == step["outcomes"], step["title"]
        if "as" in step:
            messages[step["as"]] = answer
        if "sameAs" in step:
            assert answer == messages[step["sameAs"]], step["title"]
        if "redriven" in step:
            assert {name: getattr(answer, name) for name in step["redriven"]} == step["redriven"], step["title"]
    return len(steps)


def _settled(
    lake: Lake, step: Step, topic: str, messages: dict[str, MessageId], now: Callable[[], datetime]
) -> tuple[Any, tuple[Outcome, ...], DelayLakeError | None]:
    """Does a step; until what it waits for is listed.

    Returns:
        the answer, the outcomes and the error.
    """
    deadline = time.monotonic() + _LISTED_SECONDS
    while True:
        try:
            answer = _done(lake, step, topic, messages, now)
        except DelayLakeError as error:
            if step.get("until") != "seen" or not isinstance(error, NotFound) or time.monotonic() > deadline:
                return None, error.outcomes, error
        else:
            wanted = _waited_for(step, messages)
            if wanted is None:
                return answer, tuple(answer) if isinstance(answer, list) else (), None
            if _summary(step, answer) == wanted:
                return answer, (), None
            assert time.monotonic() < deadline, f"{step['title']}: {answer}, not {wanted}"
        time.sleep(0.2)


def _waited_for(step: Step, messages: dict[str, MessageId]) -> Any:
    """Returns what a step's answer is to be, as `_summary`, before it goes on; None: any."""
    if "listed" in step:
        return [(messages[name], step.get("expiresAt"), step.get("expiresAfterMillis")) for name in step["listed"]]
    if "waitingFor" in step:
        return step["waitingFor"], step["cancelledFor"]
    return step["redriven"]["matched"] if step.get("dryRun") else None


def _summary(step: Step, answer: Any) -> Any:
    if "listed" in step:
        return [
            (
                one.id,
                one.expires_at and millis("expires_at", one.expires_at) if "expiresAt" in step else None,
                (one.expires_at - one.deliver_at) // timedelta(milliseconds=1)
                if "expiresAfterMillis" in step
                else None,
            )
            for one in answer
        ]
    return (sorted(answer.waiting_for), sorted(answer.cancelled_for)) if "waitingFor" in step else answer.matched


def _done(lake: Lake, step: Step, topic: str, messages: dict[str, MessageId], now: Callable[[], datetime]) -> Any:
    where = f"{topic}_{step['topic']}" if "topic" in step else topic
    named = {} if step["do"] == "schedule" else _named(step, messages)
    same = ("subscription", "reason", "limit", "key", "properties")
    named |= {"messages": [messages[name] for name in step["messages"]]} if "messages" in step else {}
    options = {name: step[name] for name in same if name in step} | named
    if "requestId" in step:
        options["request_id"] = f"{topic.rpartition('/')[2]}-{step['requestId']}"
    if "afterMillis" in step:
        options["after"] = timedelta(milliseconds=step["afterMillis"])
    if "byMillis" in step:
        options["by"] = timedelta(milliseconds=step["byMillis"])
    if "expireAfterMillis" in step:
        options["expire_after"] = timedelta(milliseconds=step["expireAfterMillis"])
    if "expireAt" in step:
        options["expire_at"] = moment(step["expireAt"])
    if "dryRun" in step:
        options["dry_run"] = step["dryRun"]
    if "dueInMillis" in step:
        options["deliver_at"] = now() + timedelta(milliseconds=step["dueInMillis"])
    match step["do"]:
        case "schedule":
            names = {"scheduleKey": "schedule_key", "repeat": "repeat", "timeZone": "time_zone"}
            options |= {ours: step[name] for name, ours in names.items() if name in step}
            return lake.schedule(where, step["payload"], **options)
        case "pending":
            return list(lake.pending(where, **options))
        case "schedules":
            return list(lake.schedules(where, **options))
        case operation:
            method = re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", operation)
            return getattr(lake, method)(where, **options)


def _named(step: Step, messages: dict[str, MessageId]) -> dict[str, Any]:
    if "scheduleKey" in step:
        return {"schedule_key": step["scheduleKey"]}
    return {"message": messages.get(step["message"], step["message"])} if "message" in step else {}
