"""Reads what prfaas uses of vLLM from a version's sources, without importing them.

    python tests/serving/engines/vllm/contracts/read.py SOURCES > tests/serving/engines/vllm/contracts/VERSION.json

SOURCES is the folder `vllm` of an unpacked wheel. Only names go into the file: methods and their parameters, fields of
classes, members of enums, command-line options, series of metrics.
"""

import ast
import json
import re
import sys
from pathlib import Path

# What the plugin imports or is handed, by the module that has it.
CLASSES = {
    "config/kv_transfer.py": ["KVTransferConfig"],
    "config/vllm.py": ["VllmConfig"],
    "config/model.py": ["ModelConfig"],
    "config/cache.py": ["CacheConfig"],
    "config/parallel.py": ["ParallelConfig"],
    "distributed/kv_events.py": ["BlockStored", "BlockRemoved", "AllBlocksCleared", "EventBatch"],
    "distributed/kv_transfer/kv_connector/v1/base.py": [
        "KVConnectorBase_V1",
        "KVConnectorRole",
        "KVConnectorTransferResults",
        "KVConnectorMetadata",
        "SupportsHMA",
    ],
    "distributed/kv_transfer/kv_connector/v1/metrics.py": ["KVConnectorStats", "KVConnectorPromMetrics"],
    "lora/request.py": ["LoRARequest"],
    "v1/core/kv_cache_manager.py": ["KVCacheBlocks", "KVCacheManager"],
    "v1/core/sched/output.py": ["KVConnectorBlockState", "SchedulerOutput"],
    "v1/kv_cache_interface.py": [
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheSpec",
        "AttentionSpec",
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "MambaSpec",
        "UniformTypeKVCacheSpecs",
    ],
    "v1/outputs.py": ["KVConnectorOutput"],
    "v1/request.py": ["Request", "RequestStatus"],
    "v1/sample/logits_processor/__init__.py": ["AdapterLogitsProcessor"],
}
FUNCTIONS = {
    "distributed/parallel_state.py": ["get_tensor_model_parallel_rank"],
    "model_executor/layers/mamba/mamba_utils.py": ["get_conv_state_layout"],
    "v1/metrics/utils.py": ["create_metric_per_engine"],
}
# Where the server's own options stand differs from version to version.
SERVER_OPTIONS = ("BaseFrontendArgs", "FrontendArgs")
# Of the others only the fields are of interest.
WITH_METHODS = (
    "KVConnectorBase_V1",
    "SupportsHMA",
    "KVConnectorStats",
    "KVConnectorPromMetrics",
    "KVCacheBlocks",
    "KVCacheManager",
    "KVConnectorBlockState",
    "AdapterLogitsProcessor",
)
_OPTION = re.compile(r'"(--[a-z][a-z0-9-]+)"')
_SERIES = re.compile(r'"(vllm:[a-z0-9_]+)"')


def contract_of(sources: Path) -> dict[str, object]:
    """Everything that `vllm-VERSION.json` holds."""
    classes = {}
    for file, names in CLASSES.items():
        found = {node.name: node for node in _parse(sources / file).body if isinstance(node, ast.ClassDef)}
        classes |= {name: _class(found[name]) for name in names if name in found}
    for file in sorted((sources / "entrypoints").rglob("*cli_args.py")):
        for node in _parse(file).body:
            if isinstance(node, ast.ClassDef) and node.name in SERVER_OPTIONS:
                classes[node.name] = _class(node)
    functions = {}
    for file, names in FUNCTIONS.items():
        for node in _parse(sources / file).body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                functions[node.name] = _parameters(node)
    series: set[str] = set()
    for file in sorted((sources / "v1" / "metrics").glob("*.py")):
        series |= set(_SERIES.findall(file.read_text(encoding="utf-8")))
    options: set[str] = set()
    for file in (sources / "engine" / "arg_utils.py",):
        options |= set(_OPTION.findall(file.read_text(encoding="utf-8")))
    return {
        "classes": classes,
        "functions": functions,
        "options": sorted(options),
        "series": sorted(series),
    }


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _class(node: ast.ClassDef) -> dict[str, object]:
    methods: dict[str, dict[str, object]] = {}
    fields: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            decorators = {ast.unparse(decorator).split(".")[-1] for decorator in each.decorator_list}
            if "property" in decorators or "cached_property" in decorators:
                fields.add(each.name)
            if node.name in WITH_METHODS:
                methods[each.name] = {
                    "parameters": _parameters(each),
                    "abstract": "abstractmethod" in decorators,
                }
            for part in ast.walk(each):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    fields |= {part.attr} if ast.unparse(part.value) == "self" else set()
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            fields.add(each.target.id)
        elif isinstance(each, ast.Assign):
            fields |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    return {
        "bases": [ast.unparse(base).split("[")[0] for base in node.bases],
        "fields": sorted(fields),
        "methods": dict(sorted(methods.items())),
    }


def _parameters(node: ast.FunctionDef) -> list[str]:
    spread = [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    rest = [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    plain = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in plain if name not in ("self", "cls")] + spread + rest


if __name__ == "__main__":
    json.dump(contract_of(Path(sys.argv[1])), sys.stdout, sort_keys=True)
    print()
