"""Options of a command, each with its default, its help and its bounds in one place; data classes of them."""

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
    """A field of a data class or a parameter that is an option; `names` and the rest are as `typer.Option` has them.

    Args:
        default: ...: it must be given.
        text: its help.
    """
    return dataclasses.field(default=default, metadata={_META: typer.Option(*names, help=text, **more)})


def argument(default: Any, text: str, **more: Any) -> Any:
    """The same of an argument; the rest as `typer.Argument`."""
    return dataclasses.field(default=default, metadata={_META: typer.Argument(help=text, **more)})


def options_of_panel(title: str) -> Callable[..., Any]:
    """`option` for the fields that stand under one title in a command's help."""
    return functools.partial(option, rich_help_panel=title)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer, of parameters that `option` and `argument` made.

    In place of a parameter that is a data class, its fields are the command's.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            inner = get_type_hints(groups[name])
            parameters += [
                _parameter(each.name, inner[each.name], each) for each in dataclasses.fields(groups[name])
            ]
        elif isinstance(parameter.default, dataclasses.Field):
            parameters.append(_parameter(name, hints[name], parameter.default))
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


def _parameter(name: str, hint: Any, field: "dataclasses.Field[Any]") -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is ... else field.default
    return inspect.Parameter(name, _KIND, default=default, annotation=Annotated[hint, field.metadata[_META]])
