"""Options of `prfaas init` for a deployment of one's own, apart from what writes it: help needs nothing else."""

from dataclasses import dataclass
from typing import Annotated

import typer

from prfaas.cli.common import CliError
from prfaas.cli.completions import recipe_names


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The command line's options for the deployment; None: not given."""

    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="An example's name; with --site the deployment's.",
        ),
    ] = "local"
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=recipe_names,
            help="A deployment of a model that people run, with your hosts: --site SITE:HOSTS.",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The checkpoint's directory on all machines, or trained:NAME, hub:ORG/NAME, tiny:NAME.",
        ),
    ] = None
    served_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What clients write as the model; the directory's name if not given."
        ),
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=1, help="Longest prompt + answer; 32768 if not given.")
    ] = None
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:KIND:HARDWARE:HOSTS",
            help="A site, for example east:prfaas:h200x8:192.0.2.10,192.0.2.11.",
        ),
    ] = None
    link: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE:TARGET:BANDWIDTH", help='A link, for example "east:home:40 Gbit/s".'),
    ] = None
    gateway: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Where clients connect; 0.0.0.0, or 127.0.0.1 on one machine."),
    ] = None

    def check_unused(self) -> None:
        """Raise CliError if one is given that says nothing about an example or a recipe."""
        own = ("served_name", "max_model_len", "link", "gateway")
        for field in own if self.recipe else ("model", *own):
            if getattr(self, field) not in (None, []):
                option = f"--{field.replace('_', '-')}"
                if self.recipe:
                    raise CliError(f"{option} does not go with --recipe; edit the file that it writes")
                raise CliError(f"{option} is for a file of your own; give its sites, too: --site")
