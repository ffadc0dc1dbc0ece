"""Control commands for the topics of the settings, and their outcomes as the command line and the API show them."""

from __future__ import annotations

from collections.abc import Sequence

from delaylake.control import ALSO_LATER, RequestFactory
from delaylake.message_ids import Outcome

from conf.errors import DelayLakeError
from conf.partitions import without_partition
from conf.settings import Settings


class ControlError(DelayLakeError):
    """A command can't be sent, or was not answered. The message is one line."""


def request_factory(
    settings: Settings,
    issued_by: str,
    topic: str,
    subscriptions: Sequence[str] = (),
    sum_up: bool = False,
    request_id: str = "",
) -> RequestFactory:
    """Returns what makes the commands for a topic of the settings; arguments are as of `RequestFactory`."""
    known: list[str] = []
    if not subscriptions or ALSO_LATER in subscriptions:
        route = settings.route(topic) or settings.route(without_partition(topic))
        known = [one.name for one in route.subscriptions] if route else []
    return RequestFactory(issued_by, topic, subscriptions, known, sum_up, request_id)


def outcome_json(outcome: Outcome) -> dict[str, object]:
    """Returns an outcome as the API's JSON."""
    return {
        "subscription": outcome.subscription,
        "ledgerId": outcome.message.ledger_id,
        "entryId": outcome.message.entry_id,
        "batchIndex": outcome.message.batch_index,
        "result": outcome.result,
        "reason": outcome.reason,
    }


def outcome_text(outcome: Outcome) -> str:
    """Returns an outcome as one line: position, subscription, result and reason."""
    message = outcome.message
    # An outcome for all that a command names has no position.
    position = f"{message.ledger_id}:{message.entry_id}" if message.ledger_id >= 0 else ""
    if message.batch_index >= 0:
        position += f":{message.batch_index}"
    return " ".join(part for part in (position, outcome.subscription, outcome.result, outcome.reason) if part)
