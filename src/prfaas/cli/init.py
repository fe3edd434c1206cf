"""`prfaas init`: a deployment file to begin with."""

import re
import shutil
from pathlib import Path

import typer

from prfaas.cli.common import AsJson, CliError, new_file, print_json
from prfaas.cli.draft_options import DraftOptions
from prfaas.cli.option_groups import option, with_options


@with_options
def init(
    out: Path = option(Path(), "Write it into this folder.", "--out", "-o", metavar="DIR"),
    *,
    given: DraftOptions,
    secrets: bool = option(
        True, "Make key, certificates and operators' token, too.", "--secrets/--no-secrets"
    ),
    force: bool = option(False, "Overwrite a file that is there.", "--force"),
    list_only: bool = option(False, "Show examples and recipes and write nothing.", "--list"),
    as_json: AsJson = False,
) -> None:
    """Write a deployment file: an example, a model's recipe, or one for your sites with key and certificates.

    KIND of a site is prfaas (only prefills long prompts) or pd (serves clients). One engine is on each of its HOSTS.
    HARDWARE is a word of yours with the GPUs of one engine, or cpu, or synthetic. Key and certificates go to the
    deployment's folder in $PRFAAS_HOME; what is there already stays. --list shows the recipes, too.

    Examples: prfaas init; prfaas init paper -o deployments; prfaas init --list; prfaas init --recipe gpt-oss-120b
    --site east:192.0.2.1,192.0.2.2 --site home:10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4; prfaas init llm
    --model /models/qwen3-next --site east:prfaas:h200x8:192.0.2.10 --site home:pd:h20x8:198.51.100.10,198.51.100.11
    --link "east:home:40 Gbit/s"
    """

    from prfaas.core.shipped import example_files

    if given.recipe is None and given.site:
        from prfaas.cli.init_draft import write_draft

        write_draft(given, out, secrets=secrets, force=force, as_json=as_json)
        return
    given.check_unused()
    examples, recipes = ({path.stem: path for path in example_files(at).values()} for at in ("", "recipes"))
    if list_only:
        _list(examples | {f"--recipe {name}": path for name, path in recipes.items()}, as_json)
    elif given.recipe is None:
        source = _chosen(examples, "example", given.name)
        target = _beside_its_folders(source, out, force)
        target.write_bytes(source.read_bytes())
        following = f"prfaas {_use(source)} {target}"
        if as_json:
            print_json({"file": str(target), "next": following})
        else:
            typer.echo(f"wrote {target}; next: {following}")
    else:
        from prfaas.cli.init_draft import filled_in, write_checked

        source = _chosen(recipes, "recipe", given.recipe)
        text = filled_in(source, given)
        target = _beside_its_folders(source, out, force)
        following = f"prfaas emit kubernetes {target} -o DIR" if given.site else f"prfaas plan {target}"
        write_checked(text, target, following, secrets=secrets and bool(given.site), as_json=as_json)


def _list(files: dict[str, Path], as_json: bool) -> None:
    if as_json:
        print_json({each: _about(path) for each, path in files.items()})
        return
    width = max(map(len, files), default=0)
    for each, path in files.items():
        typer.echo(f"{each:{width}}  {_about(path)}")


def _chosen(files: dict[str, Path], what: str, name: str) -> Path:
    source = files.get(name.removesuffix(".yaml"))
    if source is None:
        known = ", ".join(files) or "none with this installation"
        raise CliError(f'there is no {what} "{name}"; there are {known}')
    return source


def _beside_its_folders(source: Path, out: Path, force: bool) -> Path:
    """Where a file goes, once the folders that it names are there."""
    target = new_file(out, source.name, force=force)
    for folder in folders_of(source):
        # Two examples may share one, and what is there may have been changed.
        if force or not (target.parent / folder.name).exists():
            shutil.copytree(folder, target.parent / folder.name, dirs_exist_ok=True)
    return target


def folders_of(example: Path) -> list[Path]:
    """Folders beside an example that its fields name: a model, profiles."""
    named = re.findall(
        r"^ *(?:path|profile): ([\w.-]+)(?:/\S+)?$", example.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [folder for name in sorted(set(named)) if (folder := example.parent / name).is_dir()]


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
