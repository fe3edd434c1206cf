"""Which of vLLM's attention modules call the hook of a computed layer, against a table in docs/reference/connector.md.

vLLM's sources are read: most of these modules can't be imported without the kernels of their platform. A model that
goes around its module's `forward` is not seen. Nothing hangs on the hook but how early a layer leaves.
"""

import ast
import functools
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

VLLM = importlib.util.find_spec("vllm")
PAGE = Path(__file__).parents[4] / "docs" / "reference" / "connector.md"
BASES = {"AttentionLayerBase": False, "MambaBase": None}
"""The base class of all layers with a KV cache, and that of linear states, which are none of attention."""


@functools.cache
def nodes() -> list[ast.stmt]:
    """Classes and functions of the sources that have layers with a KV cache, or operators that tell of them."""
    assert VLLM is not None and VLLM.submodule_search_locations
    sources = [
        path.read_text(encoding="utf-8") for path in Path(VLLM.submodule_search_locations[0]).rglob("*.py")
    ]
    headers = [re.findall(r"^class (\w+)\(([^)]*)\)", source, re.M) for source in sources]
    layers, before = set(BASES), 0
    # By their text first: to parse all of vLLM takes ten times as long.
    while len(layers) > before:
        before = len(layers)
        layers |= {
            name for found in headers for name, bases in found if layers & set(re.findall(r"\w+", bases))
        }
    return [
        node
        for source, found in zip(sources, headers, strict=True)
        if "@maybe_transfer_kv_layer" in source or any(name in layers for name, _ in found)
        for node in ast.parse(source).body
    ]


def called(node: ast.AST) -> set[str]:
    """The last words of all that is called in it; "super().forward" as a whole."""
    calls = [ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {call if call == "super().forward" else call.rpartition(".")[2] for call in calls}


def hooks() -> set[str]:
    """Operators that tell the connector of a layer."""
    functions = [node for node in nodes() if isinstance(node, ast.FunctionDef)]
    return {
        function.name
        for function in functions
        if "maybe_transfer_kv_layer" in map(ast.unparse, function.decorator_list)
    }


def decided() -> dict[str, bool]:
    """Layers with a KV cache that compute in their own way, by class: whether they call the hook."""
    known: dict[str, bool | None] = dict(BASES)
    own, telling = {}, hooks()
    classes = [node for node in nodes() if isinstance(node, ast.ClassDef)]
    while True:
        before = len(known)
        for node in classes:
            bases = [
                known[name] for base in node.bases if (name := ast.unparse(base).rpartition(".")[2]) in known
            ]
            if node.name in known or not bases:
                continue
            if None in bases:
                known[node.name] = None
                continue
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            calls = called(node)
            inherits = "forward" not in methods or "super().forward" in calls
            known[node.name] = tells = bool(calls & telling or (inherits and bases[0]))
            if not inherits:
                own[node.name] = tells
        if len(known) == before:
            return own


def told() -> dict[str, bool]:
    """The same by the table."""
    rows = re.findall(
        r"^\| [^|]+ \| ((?:`\w+`(?:, )?)+) \| (yes|no) \|$", PAGE.read_text(encoding="utf-8"), re.M
    )
    return {name: hook == "yes" for names, hook in rows for name in re.findall(r"\w+", names)}


def calls_in_order(module: str, owner: str) -> list[str]:
    """What the `forward` of a class of vLLM's attention layers calls, from its first line to its last."""
    assert VLLM is not None and VLLM.submodule_search_locations
    place = Path(VLLM.submodule_search_locations[0], "model_executor", "layers", "attention", f"{module}.py")
    classes = [each for each in ast.parse(place.read_text()).body if isinstance(each, ast.ClassDef)]
    (found,) = (each for each in classes if each.name == owner)
    (forward,) = (each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == "forward")
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call)]
    named = [
        ast.unparse(node.func) for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset))
    ]
    return [name.rpartition(".")[2] for name in named]


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed")
def test_kv_is_written_before_the_hook_in_front_of_attention() -> None:
    """A layer leaves there: what is written later would not have left, and nobody would notice."""
    update, attend = "unified_kv_cache_update", "unified_attention_with_output"
    calls = [name for name in calls_in_order("attention", "Attention") if name in (update, attend)]
    assert calls == [update, attend] * 2
    update, attend = "unified_mla_kv_cache_update", "unified_mla_attention_with_output"
    calls = [name for name in calls_in_order("mla_attention", "MLAAttention") if name in (update, attend)]
    assert calls == [update, attend]


def test_layers_whose_backend_writes_while_it_attends_wait_for_the_hook_behind_it() -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    from prfaas.serving.engines.vllm.connector import _writing_first

    def layer(kind: type, **fields: object) -> object:
        made = kind.__new__(kind)
        made.__dict__ |= fields
        return made

    layers = {
        "first": layer(Attention, attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False)),
        "while": layer(Attention, attn_backend=SimpleNamespace(forward_includes_kv_cache_update=True)),
        "latent": layer(MLAAttention, hisparse_cache=None),
        "sparse": layer(MLAAttention, hisparse_cache=object()),
        "state": object(),
    }
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert _writing_first(config) == {"first", "latent"}  # type: ignore[arg-type]


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed")
def test_the_table_of_modules_is_what_vllms_sources_say() -> None:
    assert {"unified_attention_with_output", "unified_mla_attention_with_output"} <= hooks()
    assert decided() == told()
