"""bench/local_transfer.py, with stand-ins in place of its engines."""

import json
from pathlib import Path

import pytest

import local_transfer
from prfaas.core.deployment import Deployment, load_deployment

pytestmark = pytest.mark.timeout(300)

KV_BYTES_AT_LEAST = 100_000
TOKENS = 1024


def with_stand_ins(deployment: Deployment) -> Deployment:
    """The same deployment, of engines that run no model."""
    document = json.loads(deployment.path.read_text())
    document["clusters"][0] |= {"hardware": "synthetic", "profile": "internal-1t-h20", "speedup": 50}
    deployment.path.write_text(json.dumps(document))
    return load_deployment(deployment.path, state_dir=deployment.state_dir)


@pytest.mark.slow("starts processes")
def test_a_prompt_goes_from_engine_to_engine_or_the_gateways_log_tells_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The gateway is a process of its own: it has to know the engines' key, wherever others keep theirs."""
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "elsewhere"))
    write = local_transfer.written
    monkeypatch.setattr(
        local_transfer, "written", lambda folder, way, model: with_stand_ins(write(folder, way, model))
    )
    answers = []
    another_way = pytest.raises(SystemExit, match="a prompt of 1024 tokens went another way: local;")
    with another_way, local_transfer.running(tmp_path / "run", "prfaas", "qwen3-next") as url:
        answers.append(local_transfer.ask(url, "prfaas", local_transfer.prompt(TOKENS, 0)))
        # It comes by our transport again.
        answers.append(local_transfer.ask(url, "nixl", local_transfer.prompt(TOKENS, 1)))
    # The first one has not ended the run already.
    (answered,) = answers
    assert answered.kv_bytes > KV_BYTES_AT_LEAST
    assert len(answered.token_ids) == local_transfer.ANSWER_TOKENS
    assert answered.prefill_s > 0 and answered.exposed_s >= 0
    assert not (tmp_path / "elsewhere").exists()
    told = capfd.readouterr().err
    assert "the end of gateway.log:" in told and "path=/v1/completions status=200" in told
