"""Our sizes against the pages that vLLM itself allocates for the tiny models, and for what drafts for them."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.deployment.speculation import speculation_of
from prfaas.core.kv.drafters import with_drafter
from prfaas.core.kv.dtypes import CacheDtypes
from prfaas.core.kv.hf_config import model_from_directory, read_config
from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.serving.engines.tiny import TINY_MODEL_NAMES, tiny_model

SCRIPT = Path(__file__).with_name("vllm_allocation.py")


MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
# A tiny model that drafts for itself has its layers twice.
DRAFTS = {"qwen3-next": MTP, "mimo-v2-flash": MTP, "qwen3": "itself"}


@pytest.fixture(scope="module")
def allocated(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], tuple[Path, Path, str]]:
    """By name of a tiny model, and whether it is with a drafter: its checkpoint, where vLLM's layers of it are told,
    and `--speculative-config`."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("allocation")
    places = {
        (name, False): (tiny_model(name, folder), folder / f"{name}.json", "") for name in TINY_MODEL_NAMES
    }
    for name, drafts in DRAFTS.items():
        checkpoint = places[name, False][0]
        if drafts == "itself":
            drafts = json.dumps(
                {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 3}
            )
        places[name, True] = (checkpoint, folder / f"{name}-drafting.json", drafts)
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *(":".join(map(str, each)) for each in places.values())],
        capture_output=True,
        text=True,
        timeout=800,
        env=env,
        cwd=folder,
    )
    assert all(place.exists() for _, place, _ in places.values()), done.stderr[-3000:]
    return places


@pytest.mark.slow("vLLM allocates the pages of every tiny model")
@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "drafts"), [*((name, False) for name in TINY_MODEL_NAMES), *((name, True) for name in DRAFTS)]
)
def test_pages_are_what_vllm_allocates(
    name: str, drafts: bool, allocated: dict[tuple[str, bool], tuple[Path, Path, str]]
) -> None:
    checkpoint, place, option = allocated[name, drafts]
    model = model_from_directory(checkpoint)
    if drafts:
        speculation = speculation_of(["--speculative-config", option])
        model = with_drafter(model, read_config(checkpoint / "config.json"), speculation, CacheDtypes())
        assert model.drafter_groups
    layers: list[dict[str, Any]] = json.loads(place.read_text())
    assert len(layers) == model.layers
    kinds = {"full": FullAttention, "window": SlidingWindow, "state": LinearState}
    for kind, type_of_group in kinds.items():
        groups = [group for group in model.groups if isinstance(group, type_of_group)]
        mine = [layer for layer in layers if layer["kind"] == kind]
        assert len(mine) == sum(group.layers for group in groups)
        for group, layer in product(groups, mine):
            if isinstance(group, LinearState):
                # With drafts there is room for their rows, which stay.
                rows = 4 if drafts else 3
                assert sorted(layer["parts"]) == sorted([group.conv_bytes // 3 * rows, group.recurrent_bytes])
                # The page may be padded to that of the attention layers.
                assert layer["page_bytes"] >= group.state_bytes
                continue
            assert layer["page_bytes"] == layer["block_tokens"] * group.token_bytes // group.layers
            if isinstance(group, SlidingWindow):
                assert layer["window"] == group.window_tokens
