"""Each operation has all that it needs: of the wire, the admin API, the command line, both clients, and the docs."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from delaylake import AsyncClient, Client, rest
from delaylake.commands import SCHEDULE_OPERATIONS, WAITING, Command, Commands, Ids, Keys, Named, done_results
from delaylake.control import RequestFactory
from delaylake.message_ids import MessageId
from delaylake.wire.delaylake_pb2 import ControlCommand
from typer.main import get_command

from admin.app import create_app
from conf.api_settings import Operation as Right
from conf.settings import Settings
from jobs import cli
from jobs.commands.messages.operations import command_name
from tracker.commands.kinds import OPERATIONS, Effect, Operation

ROOT = Path(__file__).parents[2]
TOPIC = "persistent://public/default/orders"

IDS = Ids([MessageId(7, 0)], [1])
KEYS = Keys(["order-7"])

# Pulsar's own names, which its command line has.
PULSARS_COMMANDS = {"cancel": "cancel-delayed-message", "skip": "skip-messages"}

each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))


@pytest.fixture(scope="module")
def paths() -> dict[str, Any]:
    """The paths of the admin API, as OpenAPI has them."""
    found: dict[str, Any] = create_app(Settings()).openapi()["paths"]
    return found


def named(operation: Operation) -> list[Named | None]:
    """What an operation may name."""
    if operation.is_of_subscription:
        return [None]
    return [IDS, KEYS] if operation.by_key else [IDS]


def values(operation: Operation) -> dict[str, int | str]:
    return {field.name: field.example for field in operation.fields}


@each_operation
def test_it_has_a_field_of_the_wire_with_its_own_fields(operation: Operation) -> None:
    message: Any = ControlCommand.DESCRIPTOR.fields_by_name[operation.kind].message_type
    if operation.kind != "cancel":  # which has the message's id itself, as Pulsar's command
        names = {field.name for field in operation.fields}
        entries = set() if operation.is_of_subscription else {"entry" if operation.names_one else "entries"}
        assert {field.name for field in message.fields} == names | entries


def test_each_field_of_the_wire_is_an_operation() -> None:
    fields = {field.name for field in ControlCommand.DESCRIPTOR.oneofs_by_name["operation"].fields}
    assert fields == {*OPERATIONS, "cancels"}


def test_what_moves_messages_is_named_in_the_tracker_by_its_description_and_its_decision_alone() -> None:
    moving = {one.kind.upper() for one in OPERATIONS.values() if one.effect is Effect.MOVE}
    naming = set()
    for path in (ROOT / "tracker").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and moving & {alias.name for alias in node.names}:
                naming.add(path.name)
            if isinstance(node, ast.Constant) and str(node.value).upper() in moving:
                naming.add(path.name)
    assert naming == {"kinds.py", "decide.py"}


@each_operation
def test_it_goes_over_the_control_topic(operation: Operation) -> None:
    for one in named(operation):
        made = RequestFactory("tester", TOPIC, ["a"])
        [request] = made.make(operation.kind, one, **values(operation))
        read = ControlCommand.FromString(request.command.SerializeToString())
        assert (read.WhichOneof("operation") or "").removesuffix("s") == operation.kind.removesuffix("s")
        content = getattr(read, operation.kind)
        assert {name: getattr(content, name) for name in values(operation)} == values(operation)


@each_operation
def test_the_client_knows_what_the_description_says(operation: Operation) -> None:
    assert (operation.kind in SCHEDULE_OPERATIONS) == operation.is_of_schedule
    assert (WAITING in done_results(operation.kind, IDS)) == operation.may_wait


@each_operation
def test_the_clients_call_is_a_route_of_the_api(operation: Operation, paths: dict[str, Any]) -> None:
    for one in named(operation):
        [call] = rest.calls(TOPIC, operation.kind, one, ["a"], values(operation))
        path = call.path.replace("/public/default/orders", "/{tenant}/{namespace}/{topic}")
        path = path.replace("/subscription/a/", "/subscription/{subscription}/").replace("/7:0", "/{id}")
        route = paths[path][call.method.lower()]
        assert operation.text.split("`")[0] in route["description"]
        assert path.endswith(f"/{operation.path}")


@each_operation
def test_it_has_a_right_if_its_route_is_made_of_its_description(operation: Operation) -> None:
    assert not operation.summary or Right(operation.right)
    assert bool(operation.summary) == bool(operation.text) == bool(operation.right)


@each_operation
def test_it_has_a_command_of_the_command_line(operation: Operation) -> None:
    groups: Any = get_command(cli.app)
    name = PULSARS_COMMANDS.get(operation.kind, command_name(operation))
    command = groups.commands["schedules" if operation.is_of_schedule else "topics"].commands[name]
    assert command.help
    options = {option for parameter in command.params for option in parameter.opts}
    assert {field.option for field in operation.fields if field.option} <= options
    assert not operation.by_key or "--schedule-key" in options


@each_operation
def test_both_clients_have_a_method_for_it(operation: Operation) -> None:
    asked: list[Command] = []

    class Recorder(Commands[None]):
        def _do(self, make: Callable[[], Command]) -> None:
            asked.append(make())

    method = getattr(Recorder(), operation.kind)
    assert getattr(Client, operation.kind) is getattr(AsyncClient, operation.kind) is getattr(Commands, operation.kind)
    assert method.__doc__
    for one in named(operation):
        method(TOPIC, **arguments(method, one, operation))
        made = asked.pop()
        assert made.operation == operation.kind
        assert type(made.named) is type(one)
        assert made.fields.keys() == values(operation).keys()


def arguments(method: Any, one: Named | None, operation: Operation) -> dict[str, Any]:
    """What a client's method needs, by its signature."""
    given: dict[str, Any] = {**values(operation), "subscription": "a"}
    given |= {"at": datetime.now(UTC), "by": timedelta(minutes=1)}
    given |= {"message": "7:0", "deliver_at": datetime.now(UTC)} if isinstance(one, Ids) else {"schedule_key": "k"}
    return {name: given[name] for name in inspect.signature(method).parameters if name in given}


@each_operation
def test_the_docs_have_it(operation: Operation) -> None:
    control, reference, api = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("control", "reference", "rest"))
    command = PULSARS_COMMANDS.get(operation.kind, command_name(operation))
    group = "schedules" if operation.is_of_schedule else "topics"
    assert f"### `delaylake {group} {command} " in reference
    assert re.search(rf"^`POST .*/{operation.path}`$", api, re.M)
    assert re.search(rf"`{operation.kind}\b", control)
    assert f"| `{operation.kind}(topic, " in reference
