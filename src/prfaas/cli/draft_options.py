"""Options of `prfaas init` for a deployment of one's own, apart from what writes it: help needs nothing else."""

from dataclasses import dataclass

from prfaas.cli.common import CliError
from prfaas.cli.completions import recipe_names
from prfaas.cli.option_groups import argument, option


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The command line's options for the deployment; None: not given."""

    name: str = argument("local", "An example's name; with --site the deployment's.", metavar="[NAME]")
    recipe: str | None = option(
        None,
        "A deployment of a model that people run, with your hosts: --site SITE:HOSTS.",
        metavar="NAME",
        autocompletion=recipe_names,
    )
    model: str | None = option(
        None,
        "The checkpoint's directory on all machines, or trained:NAME, hub:ORG/NAME, tiny:NAME.",
        metavar="DIR",
    )
    served_name: str | None = option(
        None, "What clients write as the model; the directory's name if not given.", metavar="NAME"
    )
    max_model_len: int | None = option(
        None, "Longest prompt + answer; 32768 if not given.", metavar="TOKENS", min=1
    )
    site: list[str] | None = option(
        None,
        "A site, for example east:prfaas:h200x8:192.0.2.10,192.0.2.11.",
        metavar="NAME:KIND:HARDWARE:HOSTS",
    )
    link: list[str] | None = option(
        None, 'A link, for example "east:home:40 Gbit/s".', metavar="SOURCE:TARGET:BANDWIDTH"
    )
    gateway: str | None = option(
        None, "Where clients connect; 0.0.0.0, or 127.0.0.1 on one machine.", metavar="HOST"
    )

    def check_unused(self) -> None:
        """Raise CliError if one is given that says nothing about an example or a recipe."""
        own = ("served_name", "max_model_len", "link", "gateway")
        for field in own if self.recipe else ("model", *own):
            if getattr(self, field) not in (None, []):
                name = f"--{field.replace('_', '-')}"
                if self.recipe:
                    raise CliError(f"{name} does not go with --recipe; edit the file that it writes")
                raise CliError(f"{name} is for a file of your own; give its sites, too: --site")
