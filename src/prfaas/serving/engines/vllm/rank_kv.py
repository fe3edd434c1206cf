"""A rank's share of an engine's KV as vLLM describes it, with what shows whether other engines keep the same."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import KVCacheConfig

from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.told import told_layers
from prfaas.serving.engines.model_identity import ModelIdentity
from prfaas.serving.engines.vllm.drafter import Drafter
from prfaas.serving.engines.vllm.fingerprint import fingerprint
from prfaas.serving.engines.vllm.layout import KvLayout, read_elements, read_packings
from prfaas.serving.engines.vllm.settings import ConnectorSettings
from prfaas.serving.engines.vllm.sibling_ranks import gather_of_ranks, layer_copies, meet_siblings
from prfaas.serving.engines.vllm.stages import LayerStage

KvCaches = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
"""The KV tensor or tensors of every layer, by the layer's name."""


@dataclass(frozen=True, slots=True)
class RankKv:
    """KV of one rank, as its connector reads it off vLLM when it starts."""

    ranks: int
    """Tensor-parallel ranks of the engine, of each of its stages."""
    stage: LayerStage
    """The layers of this rank among those of the model."""
    layout: KvLayout
    marks: dict[str, str | int]
    """The fingerprint, by which engines know that KV means the same to both."""
    sockets: dict[int, socket.socket]
    """To the other ranks of its stage, where they keep some of the same and share their staging."""
    on_device: bool
    """KV is in an accelerator's memory."""
    told: dict[str, object]
    """How the engine reuses prefixes and what its layers keep, for those who ask its KV port."""

    @classmethod
    def of_engine(
        cls,
        settings: ConnectorSettings,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: KvCaches,
        rank: int,
    ) -> "RankKv":
        """Read it. All ranks of an engine call this at the same time: they meet.

        Args:
            settings: this instance's part of the deployment.
            vllm_config: for the fingerprint.
            kv_cache_config: the engine's KV cache groups.
            kv_caches: the KV tensor or tensors of every layer of this rank.
            rank: the tensor-parallel rank.

        Raises:
            LayoutError: a group or tensor that can't be moved as pages.
            OSError: a file of the model can't be read.
        """
        drafter = Drafter.of_engine(vllm_config, [name for name in _built(vllm_config) if name in kv_caches])
        copies = layer_copies(kv_cache_config, vllm_config, drafter)
        sockets = meet_siblings(rank, gather_of_ranks) if copies else {}
        layout = KvLayout.of_engine(
            kv_cache_config,
            kv_caches,
            _built_order(vllm_config),
            read_packings(vllm_config),
            read_elements(vllm_config),
            drafter,
            copies if sockets else None,
        )
        stage = LayerStage.of_engine(layout, vllm_config.parallel_config.pipeline_parallel_size)
        model = vllm_config.model_config
        identity = ModelIdentity.of(
            # Weights that come out of an object store: the directory has only the other files.
            model.model_weights or model.model,
            model.tokenizer,
            model.revision,
            model.tokenizer_revision,
        )
        marks = fingerprint(
            stage.model,
            vllm_config,
            identity,
            get_conv_state_layout(),
            page_digests=settings.transfer.page_digests,
            convert_kv=settings.convert_kv,
        )
        return cls(
            ranks=vllm_config.parallel_config.tensor_parallel_size,
            stage=stage,
            layout=layout,
            marks=marks,
            sockets=sockets,
            on_device=any(tensor.device.type == "cuda" for tensor in _tensors(kv_caches)),
            told={
                "drops_last_block": drops_last_block(vllm_config, kv_cache_config, layout),
                "own_last_tokens": own_last_tokens(vllm_config),
                "kv_layers": told_layers(
                    (region.group, region.page_bytes, region.copies) for region in stage.model
                ),
            },
        )


def _built_order(vllm_config: VllmConfig) -> Sequence[str]:
    """The layers' names as the model was built; none with speculative decoding, which rewrites states after a step."""
    return () if vllm_config.speculative_config is not None else _built(vllm_config)


def _built(vllm_config: VllmConfig) -> Sequence[str]:
    return tuple(getattr(vllm_config.compilation_config, "static_forward_context", ()))


def drops_last_block(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, layout: KvLayout) -> bool:
    """True if vLLM computes the last full-attention block of a prefix hit anew, for EAGLE and MTP.

    Their drafters start from hidden states, which no block has. vLLM drops it in the groups of the drafter's layers,
    and in all groups if none is marked (read in 0.32: `v1/core/kv_cache_coordinator.py`).
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle_block_drop():
        return False
    full = {region.group.index for region in layout.regions if region.group.kind is GroupKind.FULL}
    marked = {index for index, group in enumerate(kv_cache_config.kv_cache_groups) if group.is_eagle_group}
    return bool(full & marked if marked else full)


def own_last_tokens(vllm_config: VllmConfig) -> int:
    """The last tokens of a prompt that this engine computes itself, whatever is moved to it.

    It samples from the last one. With several modules for multi-token prediction vLLM's later steps go back over the
    tokens that these look ahead by, and have hidden states only of those that it has computed: as NIXL's connector does
    (read in 0.32: `_prefill_backoff` of nixl/base_scheduler.py).
    """
    looked_ahead: int = vllm_config.num_prefill_lookahead_tokens
    return max(1, looked_ahead - 1)


def _tensors(kv_caches: KvCaches) -> list[torch.Tensor]:
    return [
        tensor
        for layer in kv_caches.values()
        for tensor in ([layer] if isinstance(layer, torch.Tensor) else layer)
    ]
