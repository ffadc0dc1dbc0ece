"""The options with which commands filter pending messages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from jobs.parsers import parse_properties, parse_time

if TYPE_CHECKING:
    from pydantic import BaseModel

    from warehouse.queries.listing import PendingFilter

    _Model = TypeVar("_Model", bound=BaseModel)

Topic = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The source topic, or one of its partitions.", show_default=False)
]
SubscriptionOption = Annotated[
    str | None, typer.Option("-s", "--subscription", help="The subscription; none: all.", show_default=False)
]
TIME = "ISO 8601 with a zone, or ms since the epoch."
DueBefore = Annotated[
    int | None,
    typer.Option(parser=parse_time, metavar="TIME", help=f"Due before: {TIME}", show_default=False),
]
DueAfter = Annotated[
    int | None,
    typer.Option(parser=parse_time, metavar="TIME", help=f"Due at this time or later: {TIME}", show_default=False),
]
Key = Annotated[str | None, typer.Option(help="The messages' key.", show_default=False)]
Properties = Annotated[
    list[str] | None,
    typer.Option("--property", metavar="KEY=VALUE", help="A property that they have. Repeatable.", show_default=False),
]
Producer = Annotated[str | None, typer.Option("--producer-name", help="Their producer's name.", show_default=False)]
Ledger = Annotated[int | None, typer.Option("-l", "--ledgerId", min=0, help="Of this ledger.", show_default=False)]
Entry = Annotated[int | None, typer.Option("-e", "--entryId", min=0, help="Of this entry.", show_default=False)]


def filter_of(
    subscription: SubscriptionOption = None,
    due_before: DueBefore = None,
    due_after: DueAfter = None,
    key: Key = None,
    properties: Properties = None,
    producer_name: Producer = None,
    ledger_id: Ledger = None,
    entry_id: Entry = None,
) -> PendingFilter:
    """Returns the filter that the options make.

    Raises:
        typer.BadParameter: the options contradict each other, or a value is not allowed.
    """
    from warehouse.queries.listing import PendingFilter

    return checked(
        PendingFilter,
        subscription=subscription,
        due_before=due_before,
        due_from=due_after,
        key=key,
        properties=parse_properties(properties),
        producer_name=producer_name,
        ledger_id=ledger_id,
        entry_id=entry_id,
    )


def with_filter(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces a command's parameter `wanted`, a filter, by the options of `filter_of`, which make it."""
    return with_options(command, "wanted", parameters_of(filter_of), filter_of)


def with_options(
    command: Callable[..., None], replaced: str, options: list[inspect.Parameter], make: Callable[..., Any]
) -> Callable[..., None]:
    """Replaces a parameter of a command by options.

    Args:
        replaced: name of the parameter.
        options: the options, as parameters.
        make: returns the parameter's value for those of the options.
    """
    names = [option.name for option in options]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        value = make(**{name: given.pop(name) for name in names})
        command(**given, **{replaced: value})

    # Typer reads a command's options from its signature and annotations.
    own = parameters_of(command)
    parameters = [one for each in own for one in (options if each.name == replaced else [each])]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def checked(model: type[_Model], **values: Any) -> _Model:
    """Makes a filter of values.

    Raises:
        typer.BadParameter: the values contradict each other, or one is not allowed.
    """
    from pydantic import ValidationError

    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise typer.BadParameter(" ".join([*map(str, first["loc"]), first["msg"]])) from None


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns a function's parameters with evaluated annotations, without importing the filter's class."""
    hints = get_type_hints(function, localns={"PendingFilter": None}, include_extras=True)
    return [
        one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for one in inspect.signature(function).parameters.values()
    ]
