"""The support table, docs/reference/support.md: what was served by real engines, read off the marks of the tests.

A test of tests/integration says what it serves by `pytest.mark.shows(model=…, …)`, with the fields of `Shown`. A text
in braces is filled in with the values that the test is parametrised with: `shows(model="{chain}")`. Marks of a
parameter or a test go before those of its file. When such a test runs, its deployment must be what it says.

`python -m tests.support_table` compares the page with the marks, and `--write` writes it.
"""

import contextlib
import difflib
import io
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.deployment import Deployment, Instance
from prfaas.core.deployment.model import trained_folder
from prfaas.core.kv.hf_config import model_from_config, read_config
from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import Group
from prfaas.serving.engines.tiny import TINY_MODEL_NAMES, tiny_config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/support.md"
_TABLES = "<!-- Below: by `python -m tests.support_table --write`, from the marks of the tests. -->\n"

ONE = "TP 1"
SAME = "16 bits"
_STATES = {"GDN": "Gated DeltaNet", "KDA": "Kimi Delta Attention"}


@dataclass(frozen=True, order=True, kw_only=True)
class Shown:
    """What a test shows of a model."""

    model: str
    """A name of `MODELS`."""
    prefill: str = ONE
    """Ranks and stages of the engine that prefills, as `ranks` writes them."""
    decode: str = ONE
    """Those of the engine that decodes, and the ranks of its data-parallel group."""
    drafts: str = ""
    """Who drafts, and where."""
    dtype: str = SAME
    """Of the KVCache at both ends."""
    pool: bool = False
    nixl: bool = False
    first_token: bool = False
    """The prefill engine samples the first token of streams."""
    interpreted: bool = False
    """With Triton's kernels in an interpreter: else the kernels of vLLM's CPU backend compute."""
    what: str = ""
    """What else is of interest, or is not as it would be in production."""


def ranks(instances: Sequence[Instance]) -> str:
    """How engines with the same task are divided, for example "TP 2, PP 2"."""
    first = instances[0]
    group = {
        each.name for each in instances if each.data_parallel and each.data_parallel == first.data_parallel
    }
    told = [f"TP {first.tensor_parallel}"]
    told += [f"PP {first.pipeline_parallel}"] * (first.pipeline_parallel > 1)
    return ", ".join(told + [f"DP {len(group)}"] * (len(group) > 1))


# --- what tests say ---------------------------------------------------------------------------------------------


def shown_by(item: pytest.Item) -> Shown | None:
    """What a test's marks say; None: nothing."""
    told: dict[str, Any] = {}
    for node in item.listchain():
        for mark in node.own_markers:
            if mark.name == "shows":
                told |= mark.kwargs
    if "model" not in told:
        return None
    callspec = getattr(item, "callspec", None)
    values = {} if callspec is None else callspec.params
    for field in fields(Shown):
        if isinstance(told.get(field.name), str):
            told[field.name] = told[field.name].format(**values)
            if field.type is bool:
                told[field.name] = told[field.name] == "True"
    return Shown(**told)


def problems(shown: Shown, deployment: Deployment) -> list[str]:
    """What a deployment does not have of what its test says that it shows."""
    far = [cluster for cluster in deployment.clusters if cluster.kind == "prfaas"]
    prefilling = [each for cluster in far or deployment.clusters for each in cluster.instances]
    decoding = [each for each in deployment.instances if "decode" in each.roles]
    options = [option for cluster in deployment.clusters for option in cluster.extra_args]
    options += deployment.engine.extra_args
    kept = {cluster.kv_cache_dtype or "auto" for cluster in deployment.clusters}
    known = {
        "prefill": (shown.prefill, ranks(prefilling)),
        "decode": (shown.decode, ranks(decoding)),
        "drafts": (bool(shown.drafts), "--speculative-config" in options),
        "dtype": (shown.dtype == SAME, kept == {"auto"}),
        # These may be there for another test.
        "pool": (shown.pool, shown.pool and bool(deployment.pools)),
        "nixl": (shown.nixl, shown.nixl and deployment.engine.local_transfer == "nixl"),
        "first_token": (shown.first_token, shown.first_token and deployment.gateway.first_token != "decode"),
    }
    source = deployment.model.source
    if source is not None and source.kind != "hub":
        known["model"] = (shown.model, source.name)
    return [
        f"{name}: its mark `shows` says {said!r}, and its deployment has {there!r}"
        for name, (said, there) in known.items()
        if said != there
    ]


def deployments_in(values: Iterable[Any]) -> Iterator[Deployment]:
    """Those of the fixtures with these values."""
    for value in values:
        if isinstance(value, tuple):
            yield from deployments_in(value)
        else:
            inner = getattr(value, "stack", value)
            if isinstance(deployment := getattr(inner, "deployment", inner), Deployment):
                yield deployment


# --- the page ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """A model of the tests."""

    title: str
    weights: str
    kinds: Callable[[], str]


@dataclass(frozen=True, order=True)
class Row:
    """A test that shows something."""

    shown: Shown
    test: str
    run: str
    """The command of the Makefile that runs it."""


def kinds_of(config: Mapping[str, Any]) -> str:
    """What the layers of a model with this configuration keep, as the connector reads it."""
    found = (_kind(group) for group in model_from_config(config, name="tiny").groups)
    return ", ".join(dict.fromkeys(found))


def _kind(group: Group) -> str:
    if isinstance(group, LinearState):
        return f"states: {_STATES.get(group.kind, group.kind)}"
    if isinstance(group, SlidingWindow):
        return "windows"
    if type(group) is not FullAttention:
        return "compressed entries"
    return "MLA" if group.is_mla else "full attention"


def _models() -> dict[str, Served]:
    """By the names in marks. Those of tests alone are read where they are used."""
    from tests.integration import deepseek_v4, kimi_linear, test_families

    own = {
        "deepseek-v4": ("DeepSeek V4", deepseek_v4.CONFIG),
        "kimi-linear": ("Kimi Linear", kimi_linear.CONFIG),
        "qwen3.5": ("Qwen3.5", test_families.QWEN_3_5),
    }
    titles = {"qwen3-next": "Qwen3-Next", "mimo-v2-flash": "MiMo-V2-Flash", "qwen3": "Qwen3"}
    made = {name: (titles.get(name, name), tiny_config(name)) for name in TINY_MODEL_NAMES}
    models = {
        name: Served(title, "random", lambda config=config: kinds_of(config))
        for name, (title, config) in (made | own).items()
    }
    for name, title in (("smollm2", "SmolLM2 135M"), ("gemma3", "Gemma 3 270M")):
        config = read_config(trained_folder(name) / "config.json")
        models[name] = Served(title, "trained", lambda config=config: kinds_of(config))
    models["qwen3-vl"] = Served("Qwen3-VL", "random", lambda: "full attention")
    models["stablelm"] = Served("StableLM, which has no reader", "random", lambda: "full attention")
    return models


class Gatherer:
    """A plugin that notes what collected tests show."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            shown = shown_by(item)
            if shown is not None:
                marks = {mark.name for mark in item.iter_markers()}
                run = "test-gemma" if "gemma" in marks else "test-all" if "extended" in marks else "test"
                self.rows.append(Row(shown, Path(item.nodeid.partition("::")[0]).stem, run))


def gathered() -> list[Row]:
    """What all tests of real engines show; none is run."""
    gatherer, said = Gatherer(), io.StringIO()
    options = ["--collect-only", "-qq", "-n", "0", "-p", "no:cacheprovider", str(ROOT / "tests/integration")]
    with contextlib.redirect_stdout(said):
        code = pytest.main(options, plugins=[gatherer])
    if code != 0:
        raise SystemExit(f"the tests can't be collected:\n{said.getvalue()}")
    return gatherer.rows


def tables(rows: Sequence[Row]) -> str:
    """Both tables: what each model was seen with, and every combination with its tests."""
    models = _models()
    unknown = sorted({row.shown.model for row in rows} - models.keys())
    if unknown:
        raise SystemExit(f"tests/support_table.py knows no model {', '.join(unknown)}: add it to `_models`")
    return (
        f"## By model\n\n{_by_model(rows, models)}\n\n## Every combination\n\n{_combinations(rows, models)}\n"
    )


def _by_model(rows: Sequence[Row], models: Mapping[str, Served]) -> str:
    columns: dict[str, Callable[[Shown], str]] = {
        "TP, PP, DP": lambda shown: _way(shown) if _way(shown) != ONE else "",
        "speculation": lambda shown: shown.drafts,
        "dtype": lambda shown: "" if shown.dtype == SAME else shown.dtype,
        "pool": lambda shown: "yes" if shown.pool else "",
        "NIXL": lambda shown: "yes" if shown.nixl else "",
        "first token": lambda shown: "yes" if shown.first_token else "",
    }
    of: dict[str, list[Shown]] = defaultdict(list)
    for row in rows:
        of[row.shown.model].append(row.shown)
    lines = [["model", "weights", "layers keep", *columns, "ran on", "GPU"]]
    for name, served in models.items():
        if name in of:
            cells = [_cell(of[name], column) for column in columns.values()]
            lines.append([served.title, served.weights, served.kinds(), *cells, _ran_on(of[name]), "no"])
    return _table(lines)


def _cell(shown: Sequence[Shown], column: Callable[[Shown], str]) -> str:
    """The values of a column; a star: with Triton's interpreter only."""
    by_value: dict[str, list[Shown]] = defaultdict(list)
    for each in shown:
        if value := column(each):
            by_value[value].append(each)
    # Where nothing of a model ran otherwise, its last columns say so.
    all_are = all(each.interpreted for each in shown)
    found = [
        value + "*" * (not all_are and all(each.interpreted for each in seen))
        for value, seen in sorted(by_value.items())
    ]
    return "; ".join(found) or "–"


def _combinations(rows: Sequence[Row], models: Mapping[str, Served]) -> str:
    of: dict[Shown, list[Row]] = defaultdict(list)
    for row in rows:
        of[row.shown].append(row)
    lines = [["model", "TP, PP, DP", "speculation", "dtype", "with", "ran on", "test", "run by"]]
    order = list(models)
    for shown in sorted(of, key=lambda each: (order.index(each.model), astuple(each))):
        also = ["pool"] * shown.pool + ["NIXL"] * shown.nixl + ["first token"] * shown.first_token
        tests = ", ".join(sorted({f"`{row.test}`" for row in of[shown]}))
        first = min((row.run for row in of[shown]), key=("test", "test-all", "test-gemma").index)
        told = "; ".join([*also, *[shown.what] * bool(shown.what)]) or "–"
        way, title = _way(shown), models[shown.model].title
        ran_on = _ran_on([shown])
        lines.append([title, way, shown.drafts or "–", shown.dtype, told, ran_on, tests, f"`make {first}`"])
    return _table(lines)


def _way(shown: Shown) -> str:
    return shown.prefill if shown.prefill == shown.decode else f"{shown.prefill} → {shown.decode}"


def _ran_on(shown: Iterable[Shown]) -> str:
    kinds = sorted({each.interpreted for each in shown})
    return "; ".join("CPU, interpreted" if interpreted else "CPU" for interpreted in kinds)


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest])


def written(text: str, rows: Sequence[Row]) -> str:
    """The page with the tables of these rows behind its own words."""
    words, found, _ = text.partition(_TABLES)
    if not found:
        raise SystemExit(f"{PAGE}: the line before its tables is missing: {_TABLES.strip()}")
    return f"{words}{_TABLES}\n{tables(rows)}"


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 where the page is not what the marks say."""
    before = PAGE.read_text(encoding="utf-8")
    after = written(before, gathered())
    if "--write" in arguments:
        PAGE.write_text(after, encoding="utf-8")
        return 0
    difference = difflib.unified_diff(before.splitlines(), after.splitlines(), "page", "marks", lineterm="")
    lines = list(difference)
    print(
        "\n".join(
            [*lines, "python -m tests.support_table --write"] if lines else ["the page is as the marks"]
        )
    )
    return 1 if lines else 0


if __name__ == "__main__":
    # Modules of the tests, which import this one by its name, must find the same classes.
    from tests.support_table import main as run

    sys.exit(run(sys.argv[1:]))
