"""The model that drafts tokens for an engine's model: which layers are its own, and which one it is."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field

from vllm.config import VllmConfig

from prfaas.serving.engines.model_identity import ModelIdentity


@dataclass(frozen=True, slots=True)
class Drafter:
    """A draft model, or the layers of a model that draft for it (MTP, EAGLE), as far as they have KV."""

    identity: str = ""
    """Equal at two engines whose drafters make the same KV; "" where nothing with KV drafts."""
    layer_names: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of_engine(cls, vllm_config: VllmConfig, layer_names: Collection[str]) -> "Drafter":
        """Find it among the layers that have KV.

        How many tokens it drafts is no part of what it is: a prompt's KV is the same.

        Args:
            vllm_config: of an engine whose models are loaded.
            layer_names: in the order in which they were built: the model's, then its drafter's.

        Raises:
            OSError: a file of the drafter can't be read.
        """
        speculative = vllm_config.speculative_config
        if speculative is None:
            return NO_DRAFTER
        own = _drafters_layers(vllm_config, layer_names)
        model = speculative.draft_model_config
        if not own or model is None:
            return NO_DRAFTER
        weights = ModelIdentity.of(model.model, model.tokenizer, model.revision, None).weights
        text = f"{speculative.method} {weights} {sorted(own)}"
        return cls(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), own)


NO_DRAFTER = Drafter()


def _drafters_layers(vllm_config: VllmConfig, layer_names: Collection[str]) -> frozenset[str]:
    """vLLM's V2 runner marks them (read in 0.32: `is_draft_layer`). Else their names tell.

    A drafter has a prefix of its own (`mtp.`, `draft_model.`), or numbers that follow the model's.
    """
    built = vllm_config.compilation_config.static_forward_context
    marked = frozenset(name for name in layer_names if getattr(built.get(name), "is_draft_layer", False))
    if marked or not layer_names:
        return marked
    model_prefix, _ = _numbered(next(iter(layer_names)))
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    own = set()
    for name in layer_names:
        prefix, number = _numbered(name)
        if prefix != model_prefix or number >= layers:
            own.add(name)
    return frozenset(own)


def _numbered(layer_name: str) -> tuple[str, int]:
    """(What comes before the first number in a layer's name, that number)."""
    parts = layer_name.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return (layer_name, 0) if place is None else (".".join(parts[:place]), int(parts[place]))
