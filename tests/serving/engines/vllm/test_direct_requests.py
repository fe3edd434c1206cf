"""What an engine keeps to by itself, for requests that did not pass the gateway: at another site, say."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.image import ImageMediaIO

from prfaas.core.deployment import load_deployment
from prfaas.serving.engines.command import EngineCommand, vllm_command

EXAMPLE = Path(__file__).parents[4] / "examples" / "local.yaml"
REMOTE = "east-prefill-0"


def command(tmp_path: Path, domains: str) -> EngineCommand:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,'
        ' "head_dim": 32}'
    )
    text = EXAMPLE.read_text().replace("trained: words", "path: model")
    path = tmp_path / "sites.yaml"
    path.write_text(text.replace("gateway:\n", f"gateway:\n  media_domains: {domains}\n"))
    deployment = load_deployment(path, state_dir=tmp_path / "state")
    return vllm_command(deployment, deployment.instance(REMOTE))


@pytest.mark.parametrize("domains", ["[]", "[images.example]"])
def test_an_engine_fetches_from_no_host_that_the_file_does_not_name(tmp_path: Path, domains: str) -> None:
    argv = command(tmp_path, domains).argv
    first = argv.index("--allowed-media-domains") + 1
    allowed = argv[first : next(place for place in range(first, len(argv)) if argv[place].startswith("--"))]
    connector = MediaConnector(allowed_media_domains=list(allowed))
    with socket.create_server(("127.0.0.1", 0)) as inside:
        url = f"http://127.0.0.1:{inside.getsockname()[1]}/keys.png"
        with pytest.raises(ValueError, match="must be from one of the allowed domains"):
            connector.load_from_url(url, ImageMediaIO())
        inside.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            inside.accept()


def test_an_engine_follows_no_redirect_and_gives_templates_up(tmp_path: Path) -> None:
    """By vLLM's own reading of the environment that an engine is started with."""
    look = "from vllm import envs; print(envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS, envs.VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT)"
    env = command(tmp_path, "[]").environment(os.environ)
    told = subprocess.run([sys.executable, "-c", look], env=env, capture_output=True, text=True, check=True)
    follows, deadline_s = told.stdout.split()[-2:]
    assert follows == "False" and 0 < float(deadline_s) <= 30
