"""Options of a command: those of one panel of its help, and data classes whose fields are options."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

# Whatever has a default, in any order.
_KIND = inspect.Parameter.KEYWORD_ONLY
_META = "typer"


def option(default: Any, text: str, *names: str, **more: Any) -> Any:
    """A field that is an option: its default, and what help says; names and the rest are those of `typer.Option`."""
    return dataclasses.field(default=default, metadata={_META: typer.Option(*names, help=text, **more)})


def argument(default: Any, text: str, **more: Any) -> Any:
    """A field that is an argument, likewise; the rest is that of `typer.Argument`."""
    return dataclasses.field(default=default, metadata={_META: typer.Argument(help=text, **more)})


def options_of_panel(title: str) -> Callable[..., Any]:
    """`option` for the fields that stand under one title in a command's help."""
    return functools.partial(option, rich_help_panel=title)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: in place of each parameter that is a data class, its fields are arguments and options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=_KIND))

    @functools.wraps(command)
    def called(**given: Any) -> None:
        made = {
            name: group(**{each.name: given.pop(each.name) for each in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        command(**made, **given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group)
    return [
        inspect.Parameter(
            each.name,
            _KIND,
            default=each.default,
            annotation=Annotated[hints[each.name], each.metadata[_META]],
        )
        for each in dataclasses.fields(group)
    ]
