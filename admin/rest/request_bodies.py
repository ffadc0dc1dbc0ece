"""Reads the parameters and bodies of calls of the admin API strictly: unknown fields are refused, not ignored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from delaylake.commands import Ids, Keys, Named
from pydantic.alias_generators import to_camel

from broker.entries.message_ids import (
    MAX_INT64,
    MessageRef,
    NumberError,
    message_ref,
    parse,
    parse_base64,
    parse_number,
)
from conf.errors import DelayLakeError
from tracker.commands.kinds import Field, Operation
from tracker.due_time import MAX_TIME_MILLIS, BadScheduleError
from tracker.properties import check_key
from tracker.schemas import MAX_REQUEST_ID_BYTES, is_reserved

MAX_KEY_CHARACTERS = MAX_REQUEST_ID_BYTES // 2  # of an Idempotency-Key: leaves room for the number of further commands
_DEFAULT_TYPE = "byteArray"  # PIP-423's, where a body's type is missing, null or empty
_MESSAGE_ID_FIELDS = {"ledgerId", "entryId", "batchIndex", "partitionIndex"}


class BadRequestError(DelayLakeError):
    """A parameter or a body can't be read. The message is one line."""


class TooManyIdsError(DelayLakeError):
    """A call has more message ids than allowed."""


def parse_json(body: bytes) -> Any:
    """Reads JSON in which no object has a name twice.

    Raises:
        BadRequestError: it is missing, or no such JSON.
    """
    if not body.strip():
        raise BadRequestError("the body is missing")
    try:
        return json.loads(body, parse_constant=_no_number, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {type(error).__name__}: {str(error)[:80]}") from None


def parse_message(given: Mapping[str, object]) -> MessageRef:
    """Reads ledgerId and entryId.

    Raises:
        BadRequestError: one of them is missing, not a number, or negative.
    """
    return message_ref(_int64(given, "ledgerId", 0), _int64(given, "entryId", 0), -1, -1)


def parse_cancel(given: Mapping[str, object]) -> Ids:
    """Reads ledgerId, entryId and deliverAt.

    Raises:
        BadRequestError: one of them is missing, not a number, or negative, or deliverAt is 0.
    """
    return Ids([parse_message(given)], [_int64(given, "deliverAt", 1)])


def parse_schedule_key(given: Mapping[str, object]) -> str | None:
    """Reads scheduleKey; None: it is missing.

    Raises:
        BadRequestError: the key is wrong, or a message id is given, too.
    """
    key = given.get("scheduleKey")
    if key is None:
        return None
    if found := [name for name in ("ledgerId", "entryId") if given.get(name) is not None]:
        raise BadRequestError(f"a message is named by its scheduleKey or by its id, not by both: {found[0]}")
    return _key(key)


def parse_named(body: bytes, max_ids: int) -> Named:
    """Reads {"scheduleKeys": [...]}, or a body as of `parse_skip`. Raises as `parse_skip`, or if a key is wrong."""
    return _keys(parse_json(body), {"scheduleKeys"}, max_ids) or Ids(parse_skip(body, max_ids))


def _keys(content: object, fields: set[str], max_ids: int) -> Keys | None:
    """Reads the schedule keys of a body, each once; None: it has none.

    Args:
        fields: the names of the fields that such a body has.
    """
    if not isinstance(content, dict) or "scheduleKeys" not in content:
        return None
    if content.keys() != fields:
        raise BadRequestError(f"with scheduleKeys the body has the fields {', '.join(sorted(fields))}")
    keys = content["scheduleKeys"]
    if not isinstance(keys, list) or not keys:
        raise BadRequestError("scheduleKeys must be a list of keys")
    if len(keys) > max_ids:
        raise TooManyIdsError(f"{len(keys):,} schedule keys; a call may have {max_ids:,}")
    return Keys(list(dict.fromkeys(map(_key, keys))))


def _key(given: object) -> str:
    if not isinstance(given, str):
        raise BadRequestError("scheduleKey must be a text")
    try:
        check_key(given)
    except (BadScheduleError, UnicodeEncodeError) as error:
        raise BadRequestError(str(error)) from None
    return given


def parse_index(given: str | None) -> int:
    """Reads the index of a message. It may be negative, though no message has such an index.

    Raises:
        BadRequestError: it is missing, or not a number.
    """
    return _int64({"index": given}, "index", -MAX_INT64)


def parse_count(given: str) -> int:
    """Reads the number of messages that an operation is for.

    Raises:
        BadRequestError: it is not a number, or negative.
    """
    return _int64({"the number of messages": given}, "the number of messages", 0)


def parse_request_id(given: str | None) -> str:
    """Reads the header Idempotency-Key, the request id that a caller has chosen; "" if there is none.

    Raises:
        BadRequestError: it is empty, too long, or has characters other than printable ASCII without the space.
    """
    if given is None:
        return ""
    if not (0 < len(given) <= MAX_KEY_CHARACTERS and all("!" <= character <= "~" for character in given)):
        raise BadRequestError(f"Idempotency-Key must be 1 to {MAX_KEY_CHARACTERS} characters of ASCII without spaces")
    if is_reserved(given):
        raise BadRequestError(f"Idempotency-Key {given[:40]!r} is reserved for what the job does itself")
    return given


def parse_subscriptions(given: object) -> list[str]:
    """Reads subscriptionNames: one text or several, each with one name or several separated by commas.

    Raises:
        BadRequestError: it is anything else.
    """
    names: list[str] = []
    for text in given if isinstance(given, list) else [] if given is None else [given]:
        if not isinstance(text, str):
            raise BadRequestError("subscriptionNames must be names")
        names += (name.strip() for name in text.split(","))
    return list(dict.fromkeys(name for name in names if name))


def parse_skip(body: bytes, max_ids: int) -> list[MessageRef]:
    """Reads the body of skipByMessageIds in any of its forms; `messageIds` without a type are byte arrays.

    Raises:
        BadRequestError: the body has none of the forms, or names no message.
        MessageIdError: a message id can't be read.
        TooManyIdsError: the body has more ids than `max_ids`.
    """
    content = parse_json(body)
    if isinstance(content, list):
        return _each(content, max_ids, _text_id)
    if not isinstance(content, dict):
        raise BadRequestError("the body must be an object or a list")
    if "messageIds" not in content and "type" not in content:
        return _of_map(content, max_ids)
    if unknown := content.keys() - {"type", "messageIds"}:
        raise BadRequestError(f"unknown: {min(unknown)[:80]!r}")
    kind, ids = content.get("type"), content.get("messageIds")
    kind = _DEFAULT_TYPE if kind is None or kind == "" else kind
    if not isinstance(kind, str) or kind.lower() not in ("messageid", "bytearray"):
        raise BadRequestError("type must be messageId or byteArray")
    if not isinstance(ids, list):
        raise BadRequestError("messageIds must be a list")
    return _each(ids, max_ids, _object_id if kind.lower() == "messageid" else _base64_id)


def parse_command(operation: Operation, body: bytes, max_ids: int) -> tuple[Named, dict[str, int | str]]:
    """Reads the messages that an operation is for, and its fields.

    The body is as of `parse_skip`; with fields {"messageIds": as in `parse_skip`, ...}. An operation that may name its
    messages by their keys takes {"scheduleKeys": [...], ...}, too.

    Returns:
        the messages, and the values by the fields' names.

    Raises:
        BadRequestError, MessageIdError, TooManyIdsError: as `parse_skip`, or a field is unknown or has a wrong value.
    """
    if not operation.fields:
        return (parse_named(body, max_ids) if operation.by_key else Ids(parse_skip(body, max_ids))), {}
    content = parse_json(body)
    names = [to_camel(one.name) for one in operation.fields]
    if operation.by_key and (keys := _keys(content, {"scheduleKeys", *names}, max_ids)) is not None:
        return keys, parse_fields(operation, content)
    needed = [to_camel(one.name) for one in operation.fields if not one.is_optional]
    if not isinstance(content, dict) or not {"messageIds", *needed} <= content.keys():
        raise BadRequestError(f"the body must be {_form(operation)}")
    if unknown := content.keys() - {"messageIds", *names}:
        is_exact = len(needed) == len(names)
        raise BadRequestError(f"the body must be {_form(operation)}" if is_exact else f"unknown: {min(unknown)[:80]!r}")
    fields = parse_fields(operation, content)
    return Ids(parse_skip(json.dumps(content["messageIds"]).encode(), max_ids)), fields


def parse_fields(operation: Operation, content: Mapping[str, object]) -> dict[str, int | str]:
    """Returns the values of an operation's fields, by their names.

    Raises:
        BadRequestError: one is missing, or has a wrong value.
    """
    return {one.name: _field(one, content) for one in operation.fields}


def _field(field: Field, content: Mapping[str, object]) -> int | str:
    name = to_camel(field.name)
    value = content.get(name)
    if field.is_optional and value is None:
        return "" if field.is_text else 0
    if not field.is_text:
        number = _int64(content, name, field.least)
        if not field.allows(number):
            raise BadRequestError(f"{name} must {_limits(field)}")
        return number
    if not isinstance(value, str):
        raise BadRequestError(f"{name} must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequestError(f"{name} has a character that can't be encoded") from None
    return value


def _limits(field: Field) -> str:
    if not field.may_be_0:
        return f"not be 0, and less than {field.most + 1}"
    return "be before the year 10000" if field.most == MAX_TIME_MILLIS - 1 else f"be {field.least} to {field.most}"


def _form(operation: Operation) -> str:
    """Returns how a body with message ids looks, for people."""
    values = {to_camel(one.name): '"..."' if one.is_text else "ms" for one in operation.fields}
    pairs = ({"messageIds": "[...]"} | values).items()
    return "{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}"


def parse_skip_map(body: bytes, max_ids: int) -> list[MessageRef]:
    """Reads a map of ledger ids to entry ids: one entry of each ledger. Raises as `parse_skip`."""
    content = parse_json(body)
    if not isinstance(content, dict):
        raise BadRequestError('the body must be a map: {"ledgerId": "entryId"}')
    return _of_map(content, max_ids)


def _of_map(content: dict[str, object], max_ids: int) -> list[MessageRef]:
    pairs = [{"ledgerId": ledger, "entryId": entry} for ledger, entry in content.items() if entry is not None]
    return _each(pairs, max_ids, parse_message)


def _each(items: Iterable[Any], max_ids: int, read: Any) -> list[MessageRef]:
    items = [item for item in items if item is not None]
    if not items:
        raise BadRequestError("no message ids")
    if len(items) > max_ids:
        raise TooManyIdsError(f"{len(items):,} message ids; a call may have {max_ids:,}")
    return list(dict.fromkeys(read(item) for item in items))


def _text_id(item: object) -> MessageRef:
    return parse(_text(item))


def _base64_id(item: object) -> MessageRef:
    return parse_base64(_text(item))


def _object_id(item: object) -> MessageRef:
    if not isinstance(item, dict):
        raise BadRequestError("a message id must be an object with ledgerId and entryId")
    # A misspelt batchIndex would skip the whole entry.
    if unknown := item.keys() - _MESSAGE_ID_FIELDS:
        raise BadRequestError(f"a message id has no {min(unknown)[:80]!r}")
    entry = parse_message(item)
    batch_index, partition = (
        -1 if item.get(name) is None else _int64(item, name, -MAX_INT64) for name in ("batchIndex", "partitionIndex")
    )
    return message_ref(entry.ledger_id, entry.entry_id, partition, batch_index)


def _text(item: object) -> str:
    if not isinstance(item, str):
        raise BadRequestError("a message id must be a text")
    return item


def _int64(given: Mapping[str, object], name: str, least: int) -> int:
    value = given.get(name)
    try:
        # Not isinstance, for which true is a number.
        number = value if type(value) is int else parse_number(value) if isinstance(value, str) else None
    except NumberError:
        number = None
    if number is None:
        raise BadRequestError(f"{name} is needed" if value is None else f"{name} must be a whole number")
    if not least <= number <= MAX_INT64:
        raise BadRequestError(f"{name} must be {least} to {MAX_INT64}")
    return number


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name comes twice")
    return content


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
