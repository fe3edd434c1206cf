"""Where text from outside becomes values: each file that parses JSON by itself is listed, so a new one is looked at."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/prfaas"

# Frames, events, etcd, the pool and STATS are not here: they have typed readers (docs/reference/invariants.md).
PARSES_JSON = {
    # Files of this machine, which an operator has put there.
    *("core/deployment/speculation.py", "core/kv/hf_config.py"),
    *("core/workload/trace.py", "core/workload/trace_columns.py"),
    *("serving/engines/hub_model.py", "serving/engines/made_folder.py", "serving/engines/model_identity.py"),
    *("serving/engines/synthetic/text.py", "serving/engines/vllm/template.py"),
    "tools/doctor.py",
    # Answers to a tool that a person runs.
    "cli/common.py",
    "tools/http_client.py",
    # Bodies of clients.
    "serving/engines/synthetic/api_bodies.py",
    # The way of a request through the gateway: answers of engines, and files of the model.
    *("serving/gateway/bodies.py", "serving/gateway/dialects.py"),
    "serving/gateway/ways/first_token.py",
    *(
        "serving/gateway/ways/pull.py",
        "serving/gateway/answers/shadow.py",
    ),
    *("serving/gateway/prompts/tokenizers.py", "serving/gateway/answers/transcript.py"),
    *("serving/gateway/answers/answer_bytes.py", "serving/gateway/answers/streams.py"),
}


def parses_json(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ("loads", "load")
        and isinstance(node.value, ast.Name)
        and node.value.id in ("json", "orjson")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_files_that_parse_json_are_listed() -> None:
    # To parse the whole house takes seconds.
    there = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "json.load" in path.read_text(encoding="utf-8") and parses_json(path)
    }
    assert there == PARSES_JSON
