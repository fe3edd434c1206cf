"""What the template does so that its forks need not."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.models import ModelRegistry, registry

from prfaas.serving.engines.tiny import tiny_model
from prfaas.serving.engines.vllm import template


def test_no_engine_asks_a_process_what_its_model_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine where vLLM has written nothing down yet."""
    architecture = "Qwen3ForCausalLM"
    lazy = ModelRegistry.models[architecture]
    monkeypatch.setitem(ModelRegistry.models, architecture, lazy)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda _: pytest.fail("a process was asked"))
    template.import_model(tiny_model("qwen3", tmp_path))
    known = ModelRegistry.models[architecture]
    assert known.inspect_model_cls().is_text_generation_model
    assert known.load_model_cls() is lazy.load_model_cls()


@pytest.mark.parametrize(("argv", "ranks"), [((), 1), (("--tensor-parallel-size", "4", "--port", "1"), 4)])
def test_ranks_are_those_of_the_command_line(argv: tuple[str, ...], ranks: int) -> None:
    assert template._ranks_of(argv) == ranks
