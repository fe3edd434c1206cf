"""The model whose engines the fidelity and falsification runs measure: a tiny one with wider layers."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from prfaas.serving.engines.tiny import tiny_config
from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.engines.tiny.weights import tiny_weights

HYBRID, DENSE = "qwen3-next", "qwen3"
HIDDEN_SIZE, LAYERS = 768, 8

# Tokens of an engine's block on CPUs, by family: vLLM makes a hybrid's as large as its states.
_BLOCK_TOKENS = {HYBRID: 256, DENSE: 128}


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """Wider layers leave the KVCache as it is, and make several times the prefill work. So what the transfer and the
    HTTP around it cost weighs as little beside prefill as it does on real machines.
    """

    family: str = HYBRID
    """`DENSE` where the CPU has no AMX: without it vLLM computes linear states and experts several times slower."""
    hidden_size: int = HIDDEN_SIZE
    layers: int = LAYERS
    """A multiple of 4. Of a hybrid each fourth has attention, the others have linear states."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """The one of a file of measurements; files of before it could be chosen do not say all of it."""
        return cls(**document.get("model", {"layers": int(document.get("layers", LAYERS))}))

    @classmethod
    def chosen(cls, options: argparse.Namespace) -> Self:
        """By the arguments of `add_arguments`."""
        return cls(options.model, options.hidden_size, options.layers)

    @property
    def block_tokens(self) -> int:
        """Of an engine's block."""
        return _BLOCK_TOKENS[self.family]

    def to_document(self) -> dict[str, Any]:
        """For a file of measurements."""
        return asdict(self)

    def write(self, directory: Path, *, with_weights: bool) -> Path:
        """The folder of a checkpoint, or of its configuration alone."""
        config = self._config()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        if with_weights and not (directory / "model.safetensors").exists():
            from safetensors.torch import save_file

            write_tokenizer(directory, config["max_position_embeddings"])
            weights = tiny_weights(self.family, config)
            save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def _config(self) -> dict[str, Any]:
        config = tiny_config(self.family)
        if self.family == HYBRID:
            inner = dict.fromkeys(
                ("moe_intermediate_size", "shared_expert_intermediate_size"), self.hidden_size
            )
            config |= inner | {"num_experts_per_tok": 4, "layer_types": config["layer_types"][: self.layers]}
        else:
            config |= {"intermediate_size": 2 * self.hidden_size, "num_key_value_heads": 2}
            config |= {"layer_types": ["full_attention"] * self.layers}
        return config | {"hidden_size": self.hidden_size, "num_hidden_layers": self.layers}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `MeasuredModel.chosen` reads."""
    parser.add_argument(
        "--model", choices=[HYBRID, DENSE], default=HYBRID, help=f"{DENSE} where the CPU has no AMX"
    )
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE, help="of the model")
    parser.add_argument(
        "--layers", type=int, choices=(4, 8), default=LAYERS, help="of the model; half of them, half the work"
    )
