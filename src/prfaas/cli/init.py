"""`prfaas init`: a deployment file to begin with."""

from pathlib import Path
from typing import Annotated

import typer

from prfaas.cli.common import AsJson


def init(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="An example's name; --list shows them.", show_default=True)
    ] = "local",
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Write it into this folder.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Show the examples and write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write one of the deployment files that come with prfaas, and say what to do with it.

    Examples: prfaas init; prfaas init paper -o deployments; prfaas init --list
    """
    import json

    from prfaas.cli.common import CliError, made_folder
    from prfaas.core.deployment.examples import example_files

    files = {path.stem: path for path in example_files().values()}
    if list_only:
        if as_json:
            typer.echo(json.dumps({each: _about(path) for each, path in files.items()}, indent=2))
            return
        width = max(map(len, files), default=0)
        for each, path in files.items():
            typer.echo(f"{each:{width}}  {_about(path)}")
        return
    source = files.get(name.removesuffix(".yaml"))
    if source is None:
        known = ", ".join(files) or "none with this installation"
        raise CliError(f'there is no example "{name}"; there are {known}')
    target = made_folder(out, "--out") / source.name
    if target.exists() and not force:
        raise CliError(f"{target} is there already; --force overwrites it")
    try:
        target.write_bytes(source.read_bytes())
    except OSError as error:
        raise CliError(f"{target}: can't be written ({error.strerror})") from error
    following = f"prfaas {_use(source)} {target}"
    if as_json:
        typer.echo(json.dumps({"file": str(target), "next": following}, indent=2))
    else:
        typer.echo(f"wrote {target}; next: {following}")


def _about(path: Path) -> str:
    """The first sentence of the comment that an example begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment).split(". ")[0].rstrip(".") + "."


def _use(path: Path) -> str:
    """What an example is for: a file without servers can only be planned."""
    from prfaas.core.deployment import DeploymentError, load_deployment

    try:
        load_deployment(path)
    except DeploymentError:
        return "plan"
    return "up"
