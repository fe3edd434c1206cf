"""bench/local_transfer.py, with stand-ins in place of its engines."""

import json
import sys
from pathlib import Path

import pytest

from prfaas.core.deployment import Deployment, load_deployment

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import local_transfer

pytestmark = pytest.mark.timeout(300)

KV_BYTES_AT_LEAST = 100_000
TOKENS = 1024


def with_stand_ins(deployment: Deployment) -> Deployment:
    """The same deployment, of engines that run no model."""
    document = json.loads(deployment.path.read_text())
    document["clusters"][0] |= {"hardware": "synthetic", "profile": "internal-1t-h20", "speedup": 50}
    deployment.path.write_text(json.dumps(document))
    return load_deployment(deployment.path, state_dir=deployment.state_dir)


def test_a_counted_prompt_goes_from_engine_to_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway is a process of its own: it has to know the engines' key, wherever others keep theirs."""
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "elsewhere"))
    write = local_transfer.written
    monkeypatch.setattr(
        local_transfer, "written", lambda folder, way, model: with_stand_ins(write(folder, way, model))
    )
    with local_transfer.running(tmp_path / "run", "prfaas", "qwen3-next") as url:
        answered = local_transfer.ask(url, "prfaas", local_transfer.prompt(TOKENS, 0))
    assert answered.kv_bytes > KV_BYTES_AT_LEAST
    assert len(answered.token_ids) == local_transfer.ANSWER_TOKENS
    assert 0 < answered.prefill_s <= answered.prefill_s + answered.exposed_s
    assert not (tmp_path / "elsewhere").exists()
