"""Cancels, skips, reschedules and lists messages through an admin API instead of the control topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx

from admin.control.requests import CANCELLED, SKIPPED, Cancel, ControlError, Outcome
from broker.entries.message_ids import MessageRef
from broker.pulsar_admin.admin_connection import http_client
from conf.errors import one_line
from conf.settings import PulsarSettings
from tracker.commands.decode import full_name
from tracker.wire.delaylake_pb2 import Result

_CONNECTIONS = 16


class RestClient:
    """A `ControlClient` that uses an admin API instead of the control topic. A context manager.

    Args:
        url: URL of the API.
        max_ids_per_call: the maximum number of message ids in a call, by the API's settings.
        pulsar: the section with the token and the certificates, which are the same for the API and the broker.
    """

    def __init__(self, url: str, max_ids_per_call: int, pulsar: PulsarSettings) -> None:
        self._url = url.rstrip("/")
        self._max_ids = max_ids_per_call
        self._http = http_client(pulsar, headers={"Prefer": "return=representation"})

    def __enter__(self) -> RestClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def cancel(
        self, topic: str, cancels: Iterable[Cancel], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Cancels delayed messages; yields their outcomes.

        Raises:
            ControlError: the API can't be reached, refuses, or does not answer in time.
        """
        path = f"{_path(topic)}/cancelDelayedMessage"
        calls = [
            {
                "ledgerId": cancel.message.ledger_id,
                "entryId": cancel.message.entry_id,
                "deliverAt": cancel.deliver_at,
                "subscriptionNames": list(subscriptions),
            }
            for cancel in cancels
        ]
        return self._post([(path, call) for call in calls], CANCELLED, timeout_seconds)

    def skip(
        self, topic: str, messages: Sequence[MessageRef], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Skips messages or whole entries; yields their outcomes.

        Without subscriptions it skips whole entries for all of the topic's, one in each call.

        Raises:
            ControlError: as above.
        """
        calls: list[tuple[str, Any]] = []
        if not subscriptions:
            calls = [(f"{_path(topic)}/acknowledgeMessage", _entry(message)) for message in messages]
        calls += self._calls(topic, messages, subscriptions, "skipByMessageIds")
        return self._post(calls, SKIPPED, timeout_seconds)

    def reschedule(
        self,
        topic: str,
        messages: Sequence[MessageRef],
        deliver_at: int,
        subscriptions: Sequence[str],
        timeout_seconds: float,
    ) -> Iterator[Outcome]:
        """Reschedules pending messages to a time, ms since the epoch; yields their outcomes.

        Raises:
            ControlError: as above.
        """
        calls = [
            (path, {"messageIds": ids, "deliverAt": deliver_at})
            for path, ids in self._calls(topic, messages, subscriptions, "reschedule")
        ]
        return self._post(calls, SKIPPED, timeout_seconds)

    def retry(
        self,
        topic: str,
        messages: Sequence[MessageRef],
        subscription: str,
        reason: str,
        after_millis: int,
        timeout_seconds: float,
    ) -> Iterator[Outcome]:
        """Delivers messages to a subscription once more; yields their outcomes.

        Raises:
            ControlError: as above.
        """
        calls = [
            (path, {"messageIds": ids, "reason": reason, "afterMillis": after_millis})
            for path, ids in self._calls(topic, messages, [subscription], "retry")
        ]
        return self._post(calls, SKIPPED, timeout_seconds)

    def skip_next(
        self, topic: str, messages: Sequence[MessageRef], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Skips the next occurrence of recurring messages, one a call; yields their outcomes.

        Raises:
            ControlError: as above.
        """
        query = httpx.QueryParams({"subscriptionNames": list(subscriptions)})
        calls = [(f"{_path(topic)}/schedules/{message}/skipNext?{query}", None) for message in messages]
        return self._post(calls, SKIPPED, timeout_seconds)

    def pause_schedules(
        self,
        topic: str,
        messages: Sequence[MessageRef],
        subscriptions: Sequence[str],
        is_paused: bool,
        timeout_seconds: float,
    ) -> Iterator[Outcome]:
        """Pauses recurring messages, or resumes them, one a call; yields their outcomes.

        Raises:
            ControlError: as above.
        """
        query = httpx.QueryParams({"subscriptionNames": list(subscriptions)})
        what = "pause" if is_paused else "resume"
        calls = [(f"{_path(topic)}/schedules/{message}/{what}?{query}", None) for message in messages]
        return self._post(calls, SKIPPED, timeout_seconds)

    def end_schedule(
        self, topic: str, message: MessageRef, subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Ends a schedule; yields its outcomes.

        Raises:
            ControlError: as above.
        """
        query = httpx.QueryParams({"subscriptionNames": list(subscriptions)})
        return self._post(
            [(f"{_path(topic)}/schedules/{message}?{query}", None)], CANCELLED, timeout_seconds, method="DELETE"
        )

    def schedules(
        self, topic: str, query: dict[str, Any], message: MessageRef | None, timeout_seconds: float = 60
    ) -> Any:
        """Returns a page of the schedules, or the schedule of a message, as the API's JSON.

        Args:
            topic: a source topic or a partition of it.
            query: the query parameters of the call.
            message: the message; None: a page.

        Raises:
            ControlError: the API can't be reached, or refuses.
        """
        path = f"{_path(topic)}/schedules{'' if message is None else f'/{message}'}"
        return self._call("GET", f"{path}?{httpx.QueryParams(query)}", None, timeout_seconds)

    def cancel_keys(
        self, topic: str, keys: Sequence[str], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Cancels the messages that wait under schedule keys, one a call; yields their outcomes.

        Raises:
            ControlError: as above.
        """
        return self._one_by_one(topic, "cancelDelayedMessage", keys, subscriptions, timeout_seconds)

    def skip_keys(
        self, topic: str, keys: Sequence[str], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Skips the messages that wait under schedule keys; yields their outcomes.

        Raises:
            ControlError: as above.
        """
        if not subscriptions:
            return self._one_by_one(topic, "acknowledgeMessage", keys, subscriptions, timeout_seconds)
        calls = self._calls(topic, keys, subscriptions, "skipByMessageIds")
        return self._post([(path, {"scheduleKeys": part}) for path, part in calls], SKIPPED, timeout_seconds)

    def reschedule_keys(
        self, topic: str, keys: Sequence[str], deliver_at: int, subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Reschedules the messages that wait under schedule keys; yields their outcomes.

        Raises:
            ControlError: as above.
        """
        calls = [
            (path, {"scheduleKeys": part, "deliverAt": deliver_at})
            for path, part in self._calls(topic, keys, subscriptions, "reschedule")
        ]
        return self._post(calls, SKIPPED, timeout_seconds)

    def skip_next_of_keys(
        self, topic: str, keys: Sequence[str], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Skips the next occurrence of the recurring messages of schedule keys; yields their outcomes.

        Raises:
            ControlError: as above.
        """
        return self._post(_schedules_of_keys(topic, keys, subscriptions, "skipNext"), SKIPPED, timeout_seconds)

    def pause_schedules_of_keys(
        self, topic: str, keys: Sequence[str], subscriptions: Sequence[str], is_paused: bool, timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Pauses the recurring messages of schedule keys, or resumes them; yields their outcomes.

        Raises:
            ControlError: as above.
        """
        what = "pause" if is_paused else "resume"
        return self._post(_schedules_of_keys(topic, keys, subscriptions, what), SKIPPED, timeout_seconds)

    def _one_by_one(
        self, topic: str, operation: str, keys: Sequence[str], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        calls = [{"scheduleKey": key, "subscriptionNames": list(subscriptions)} for key in keys]
        return self._post([(f"{_path(topic)}/{operation}", call) for call in calls], SKIPPED, timeout_seconds)

    def restore(
        self, topic: str, messages: Sequence[MessageRef], subscriptions: Sequence[str], timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Undoes cancels and skips; yields their outcomes.

        Raises:
            ControlError: as above.
        """
        return self._post(self._calls(topic, messages, subscriptions, "restore"), SKIPPED, timeout_seconds)

    def pause(
        self, topic: str, subscriptions: Sequence[str], is_paused: bool, timeout_seconds: float
    ) -> Iterator[Outcome]:
        """Pauses subscriptions, or resumes them (`is_paused` is False); yields an outcome for each.

        Raises:
            ControlError: as above.
        """
        operation = "pause" if is_paused else "resume"
        paths = [f"{_path(topic)}/subscription/{quote(name, safe='')}/{operation}" for name in subscriptions]
        return self._post([(path, None) for path in paths], SKIPPED, timeout_seconds)

    def _calls(
        self, topic: str, messages: Sequence[MessageRef | str], subscriptions: Sequence[str], operation: str
    ) -> list[tuple[str, Any]]:
        """Returns the path and the message ids, or schedule keys, of each call."""
        return [
            (
                f"{_path(topic)}/subscription/{quote(name, safe='')}/{operation}",
                [str(message) for message in messages[start : start + self._max_ids]],
            )
            for name in subscriptions
            for start in range(0, len(messages), self._max_ids)
        ]

    def message_id_by_index(self, topic: str, index: int) -> MessageRef:
        """Returns the entry with an index, and its partition.

        Raises:
            ControlError: the API can't be reached, or has no such entry.
        """
        found = self._call("GET", f"{_path(topic)}/getMessageIdByIndex?index={index}", None, 30)
        return MessageRef(found["ledgerId"], found["entryId"], found["partitionIndex"])

    def delayed(self, topic: str, query: dict[str, Any], is_stats: bool, timeout_seconds: float = 60) -> Any:
        """Returns a page of the pending messages, or with `is_stats` their counts, as the API's JSON.

        Args:
            topic: a source topic or a partition of it.
            query: the query parameters of the call: the filter, and those of the page.
            is_stats: whether to return counts.

        Raises:
            ControlError: the API can't be reached, or refuses.
        """
        path = f"{_path(topic)}/delayed{'/stats' if is_stats else ''}"
        return self._call("GET", f"{path}?{httpx.QueryParams(query)}", None, timeout_seconds)

    def by_filter(
        self, topic: str, subscription: str, operation: str, content: dict[str, Any], timeout_seconds: float
    ) -> Any:
        """Changes all messages that match a filter; returns the counts as the API's JSON.

        Args:
            topic: a source topic or a partition of it.
            subscription: the subscription.
            operation: the last part of the call's path.
            content: the body: the filter, and the change.

        Raises:
            ControlError: as above.
        """
        path = f"{_path(topic)}/subscription/{quote(subscription, safe='')}/{operation}"
        return self._call("POST", path, content, timeout_seconds)

    def redrive(self, topic: str, content: dict[str, Any], request_id: str, timeout_seconds: float) -> dict[str, Any]:
        """Re-drives the dead letters that match a filter; returns the counts as the API's JSON.

        Args:
            topic: a source topic or a partition of it.
            content: the body: the filter, and whether it is a dry run.
            request_id: the request id.

        Raises:
            ControlError: as above.
        """
        headers = {"Idempotency-Key": request_id}
        found: dict[str, Any] = self._call("POST", f"{_path(topic)}/dlq/redrive", content, timeout_seconds, headers)
        return found

    def _post(
        self, calls: list[tuple[str, Any]], done: frozenset[int], timeout_seconds: float, method: str = "POST"
    ) -> Iterator[Outcome]:
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            for found in pool.map(lambda call: self._call(method, call[0], call[1], timeout_seconds), calls):
                for published in found["outcomes"]:
                    yield Outcome(
                        published["subscription"],
                        MessageRef(published["ledgerId"], published["entryId"], -1, published["batchIndex"]),
                        published["result"],
                        published["reason"],
                        Result.Value(published["result"]) in done,
                    )

    def _call(
        self, method: str, path: str, content: Any, timeout_seconds: float, headers: dict[str, str] | None = None
    ) -> Any:
        """Makes a call, and returns the JSON of its answer, also of an error with outcomes.

        Raises:
            ControlError: the API can't be reached, or refuses.
        """
        try:
            response = self._http.request(
                method, self._url + path, json=content, timeout=timeout_seconds, headers=headers
            )
            found = response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            reason = one_line(error) or type(error).__name__
            raise ControlError(f"no answer from {self._url} ({reason}): is this an admin API (--admin-url)?") from error
        if response.is_success or "outcomes" in found:
            return found
        raise ControlError(f"{response.status_code}: {found.get('reason', response.reason_phrase)}")


def _path(topic: str) -> str:
    domain, _, rest = full_name(topic).partition("://")
    return "/".join(["/admin/v2", domain, *(quote(part, safe="") for part in rest.split("/", 2))])


def _schedules_of_keys(
    topic: str, keys: Sequence[str], subscriptions: Sequence[str], operation: str
) -> list[tuple[str, Any]]:
    """Returns the path and body of a call for each key's schedule."""
    names = list(subscriptions)
    queries = [httpx.QueryParams({"scheduleKey": key, "subscriptionNames": names}) for key in keys]
    return [(f"{_path(topic)}/schedules/{operation}?{query}", None) for query in queries]


def _entry(message: MessageRef) -> dict[str, int]:
    return {"ledgerId": message.ledger_id, "entryId": message.entry_id}
