"""Our sizes against the pages that vLLM itself allocates for the tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv import FullAttention, LinearState, SlidingWindow, model_from_directory
from prfaas.serving.engines.tiny import TINY_MODEL_NAMES, tiny_model

SCRIPT = Path(__file__).with_name("vllm_allocation.py")


@pytest.fixture(scope="module")
def allocated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The checkpoint of each tiny model, and where vLLM's layers of it are told."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("allocation")
    places = {name: (tiny_model(name, folder), folder / f"{name}.json") for name in TINY_MODEL_NAMES}
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *(f"{checkpoint}:{place}" for checkpoint, place in places.values())],
        capture_output=True,
        text=True,
        timeout=800,
        env=env,
        cwd=folder,
    )
    assert all(place.exists() for _, place in places.values()), done.stderr[-3000:]
    return places


@pytest.mark.slow("vLLM allocates the pages of every tiny model")
@pytest.mark.engine
@pytest.mark.parametrize("name", TINY_MODEL_NAMES)
def test_pages_are_what_vllm_allocates(name: str, allocated: dict[str, tuple[Path, Path]]) -> None:
    checkpoint, place = allocated[name]
    model = model_from_directory(checkpoint)
    layers: list[dict[str, Any]] = json.loads(place.read_text())
    assert len(layers) == model.layers
    for group in model.groups:
        if isinstance(group, LinearState):
            mine = [layer for layer in layers if layer["kind"] == "state"]
            for layer in mine:
                assert sorted(layer["parts"]) == sorted([group.conv_bytes, group.recurrent_bytes])
                # The page may be padded to that of the attention layers.
                assert layer["page_bytes"] >= group.state_bytes
        else:
            kind = "window" if isinstance(group, SlidingWindow) else "full"
            mine = [layer for layer in layers if layer["kind"] == kind]
            for layer in mine:
                assert layer["page_bytes"] == layer["block_tokens"] * group.token_bytes // group.layers
                if isinstance(group, SlidingWindow):
                    assert layer["window"] == group.window_tokens
        assert len(mine) == group.layers
    kinds = {"full": FullAttention, "window": SlidingWindow, "state": LinearState}
    assert {kinds[layer["kind"]] for layer in layers} == {type(group) for group in model.groups}
