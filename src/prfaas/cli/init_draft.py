"""`prfaas init` for sites of one's own: a drafted file or a recipe, key, certificates and the operators' token."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prfaas.cli.common import CliError, new_file, print_json
from prfaas.cli.draft import Draft, DraftLink, DraftSite, check_host, check_model, drafted_source
from prfaas.cli.draft_options import DraftOptions
from prfaas.core.deployment import DeploymentError, load_deployment
from prfaas.core.extras import how_to_install
from prfaas.tools.emit.template import yaml_scalar

if TYPE_CHECKING:
    from prfaas.core.deployment import Deployment

_MAX_MODEL_LEN = 32768


def write_draft(given: DraftOptions, out: Path, *, secrets: bool, force: bool, as_json: bool) -> None:
    """Write the file, make what else machines need, and say what to do with it.

    Raises:
        CliError: the options make no deployment, or a file is there already or can't be written.
    """
    draft = _draft(given)
    draft.check()
    target = new_file(out, f"{draft.name}.yaml", force=force)
    own = draft.is_on_one_machine
    following = f"prfaas up {target}" if own else f"prfaas emit systemd {target} -o DIR"
    write_checked(draft.text(), target, following, secrets=secrets and not own, as_json=as_json)


def write_checked(text: str, target: Path, following: str, *, secrets: bool, as_json: bool) -> None:
    """Write a deployment file that can be run, make its secrets if wanted, and say what to do next.

    Raises:
        CliError: the text makes no deployment.
    """
    loaded = _written(text, target)
    made = _secrets(loaded) if secrets else ()
    if as_json:
        print_json({"file": str(target), "secrets": [str(path) for path in made], "next": following})
        return
    typer.echo(f"wrote {target}; next: {following}")
    for path in made:
        typer.echo(f"made {path}")


def filled_in(source: Path, given: DraftOptions) -> str:
    """A recipe's text with the user's checkpoint and hosts, in the order of its machines; without any, with its own.

    Raises:
        CliError: hosts or checkpoint can't be those of the recipe.
    """
    machines: dict[str, dict[str, None]] = {}
    for instance in load_deployment(source).instances:
        machines.setdefault(instance.cluster, {})[instance.host] = None
    hosts: dict[str, str] = {}
    for site, listed in (text.partition(":")[::2] for text in given.site or ()):
        old, new = machines.pop(site, {}), [host.strip() for host in listed.split(",") if host.strip()]
        if len(old) != len(new):
            problem = f"has {len(old)} machines there" if old else "has no such site, or it is given twice"
            raise CliError(f'--site "{site}:{listed}": recipe {given.recipe} {problem}; write SITE:HOST,HOST')
        for host in new:
            check_host(host, f"site {site}:")
        hosts |= zip(old, new, strict=True)
    if hosts and machines:
        raise CliError(
            f"recipe {given.recipe} has hosts at {' and '.join(machines)}, too; give --site for all"
        )
    text = source.read_text(encoding="utf-8")
    if given.model is not None:
        check_model(given.model)
        found = drafted_source(given.model)
        kind, name = ("path", given.model) if found is None else (found.kind, found.name)
        text = re.sub("^  path: .*$", lambda _: f"  {kind}: {yaml_scalar(name)}", text, flags=re.MULTILINE)
    return re.sub(r"(?<=\bhost: )[\d.]+", lambda found: yaml_scalar(hosts.get(found[0], found[0])), text)


def _draft(given: DraftOptions) -> Draft:
    if given.model is None:
        raise CliError(
            "--model is missing; name the checkpoint's directory, or trained:words, hub:ORG/NAME or tiny:qwen3-next"
        )
    draft = Draft(
        name=given.name,
        model=given.model,
        served_name=given.served_name or _name_of(given.model),
        max_model_len=given.max_model_len or _MAX_MODEL_LEN,
        sites=tuple(map(DraftSite.parse, given.site or ())),
        links=tuple(map(DraftLink.parse, given.link or ())),
        gateway_host="0.0.0.0",
    )
    own = "127.0.0.1" if draft.is_on_one_machine else "0.0.0.0"
    return replace(draft, gateway_host=given.gateway or own)


def _name_of(model: str) -> str:
    source = drafted_source(model)
    return (model if source is None else source.name).rstrip("/").rpartition("/")[2] or "model"


def _written(text: str, target: Path) -> "Deployment":
    """The file, checked before it takes the place of another."""
    trial = target.with_name(f".{target.name}.new")
    try:
        trial.write_text(text, encoding="utf-8")
        try:
            load_deployment(trial)
        except DeploymentError as error:
            raise CliError(f"these options make no deployment: {error.field}: {error.problem}") from None
        trial.replace(target)
    finally:
        trial.unlink(missing_ok=True)
    return load_deployment(target)


def _secrets(deployment: "Deployment") -> tuple[Path, ...]:
    """Key, certificates and token: those that are not there yet, with where they are."""
    try:
        from prfaas.serving.certificates import CertificateFolder
        from prfaas.serving.secret_files import create_key, create_token
    except ModuleNotFoundError as error:
        raise CliError(
            f"{deployment.path} is written, but keys need the gateway's packages ({error.name} is missing): "
            f"{how_to_install('gateway')}, then prfaas key and prfaas certs; or say --no-secrets"
        ) from error
    security, token_file = deployment.security, deployment.gateway.admin.token_file
    made = []
    if not security.key_file.exists():
        create_key(security.key_file)
        made.append(security.key_file)
    if token_file is not None and not token_file.exists():
        create_token(token_file)
        made.append(token_file)
    if any(deployment.needs_certificate(instance.name) for instance in deployment.instances):
        folder = CertificateFolder(deployment)
        if folder.make():
            made.append(folder.path)
    return tuple(made)
