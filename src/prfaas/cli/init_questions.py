"""What `prfaas init --ask` asks for, where no option says it."""

from collections.abc import Sequence

import typer

from prfaas.cli.draft import DraftError, DraftLink, DraftSite, check_model


def ask(question: str, default: str | None = None) -> str:
    """One line from the person at the terminal; questions go to stderr."""
    answer = typer.prompt(question, default=default, err=True)
    return str(answer).strip()


def ask_model() -> str:
    """Where the model is, asked again until every machine can find it there."""
    while True:
        model = ask(
            "The checkpoint's directory on all machines (or trained:words, hub:ORG/NAME, tiny:qwen3-next)"
        )
        try:
            check_model(model)
        except DraftError as error:
            typer.echo(f"  {error}", err=True)
        else:
            return model


def ask_sites() -> tuple[DraftSite, ...]:
    """Sites, until there is no further one. One that can't be is asked for again."""
    sites: list[DraftSite] = []
    while True:
        more = " (empty: no more)" if sites else ""
        name = ask(f"Name of a site{more}", "" if sites else None)
        if not name:
            return tuple(sites)
        if name in {site.name for site in sites}:
            typer.echo(f'  there is a site "{name}" already; give this one another name', err=True)
            continue
        kind = ask(
            "  prfaas (only prefills long prompts) or pd (serves clients)", "pd" if sites else "prfaas"
        )
        hardware = ask("  GPUs of one engine, for example h200x8", sites[-1].engine if sites else None)
        hosts = ask("  its hosts, one engine on each, with commas between")
        try:
            sites.append(DraftSite.parse(f"{name}:{kind}:{hardware}:{hosts}"))
        except DraftError as error:
            typer.echo(f"  {error}", err=True)


def ask_links(sites: Sequence[DraftSite]) -> tuple[DraftLink, ...]:
    """One from each site that only prefills to each that serves clients."""
    links: list[DraftLink] = []
    for source in sites:
        for target in sites:
            if source.kind != "prfaas" or target.kind != "pd":
                continue
            while True:
                bandwidth = ask(f"Bandwidth from {source.name} to {target.name}, for example 40 Gbit/s")
                try:
                    links.append(DraftLink.parse(f"{source.name}:{target.name}:{bandwidth}"))
                except DraftError as error:
                    typer.echo(f"  {error}", err=True)
                else:
                    break
    return tuple(links)
