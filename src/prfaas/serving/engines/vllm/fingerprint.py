"""Fingerprints: facts that must be equal for KV to mean the same to two engines, or to the engines of one pool."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from vllm.config import VllmConfig

from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.page_layout import told_layouts
from prfaas.serving.engines.model_identity import ModelIdentity
from prfaas.serving.engines.page_digests import DIGEST_FORMAT
from prfaas.serving.engines.vllm.layout import KvLayout
from prfaas.serving.engines.vllm.stages import ModelRegion
from prfaas.serving.transport.protocol.fingerprint import MAY_DIFFER, WINDOW_DRAFTS

# The fingerprint is part of a handshake of 8 KiB; a difference is one line.
_MOST_TOLD_CHARS = 64


def fingerprint(
    regions: Sequence[ModelRegion],
    vllm_config: VllmConfig,
    identity: ModelIdentity,
    conv_state_layout: str,
    *,
    page_digests: bool,
    convert_kv: bool = False,
) -> dict[str, str | int]:
    """Facts that must be equal on both sides for KV to mean the same, by names that an error can give.

    How the two keep it may differ: `wire_forms` says what travels then. So may their drafters, whose KV travels only
    where both have the same.
    """
    model = vllm_config.model_config
    compared = [
        (r.layer_name, r.part, r.group.kind.value, r.group.window_tokens)
        for r in regions
        if not r.is_drafters
    ]
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    # In the order in which a difference is looked for: what says most comes before digests of many things.
    return {
        "architecture": ",".join(getattr(model.hf_config, "architectures", None) or ()),
        **_told_settings(model.hf_text_config.to_dict()),
        "weights": identity.weights,
        "quantization": str(model.quantization),
        "tokenizer": identity.tokenizer,
        "dtype": str(model.dtype),
        "kv_cache_dtype": MAY_DIFFER if convert_kv and _are_convertible(regions) else cache_dtype,
        "conv_state_layout": conv_state_layout,
        "layers": len(compared),
        WINDOW_DRAFTS: _window_drafts(regions, vllm_config),
        "model_config": _digest(_portable(model.hf_config.to_dict())),
        "regions": _digest(compared),
        "page_digests": DIGEST_FORMAT if page_digests else "off",
    }


def _window_drafts(regions: Sequence[ModelRegion], vllm_config: VllmConfig) -> str:
    """How many drafts windows keep further tokens for, which vLLM goes back over.

    With several modules for multi-token prediction vLLM keeps a window longer by the drafts less one (read in 0.32:
    `extra_retained_tokens`). A producer with fewer drafts may have freed these tokens before its prefill ends, and a
    block without them would be a prefix hit later.
    """
    drafts: int = vllm_config.num_prefill_lookahead_tokens
    has_windows = any(region.group.kind is GroupKind.WINDOW for region in regions)
    return str(drafts) if has_windows and drafts > 1 else MAY_DIFFER


def _are_convertible(regions: Sequence[ModelRegion]) -> bool:
    """Layouts say of all that is not a linear state what it consists of."""
    return all(region.element for region in regions if region.group.kind is not GroupKind.STATE)


def pool_fingerprint(marks: Mapping[str, str | int], layout: KvLayout, ranks: int) -> str:
    """Digest of the facts that engines of one pool must share: all but those of transfers alone.

    A pool's pages are those of its engines as they are, so these must keep them alike.
    """
    shared = {name: mark for name, mark in marks.items() if name != "page_digests"}
    groups = [region.group.index for region in layout.regions]
    pages = told_layouts([region.layout for region in layout.regions])
    return _digest([shared, layout.drafter.identity, ranks, groups, pages])


def _told_settings(config: Mapping[str, object]) -> dict[str, str]:
    """Settings of a model that an error shall give with both values: its vocabulary and its rotary positions."""
    told = {"vocab_size": str(config.get("vocab_size"))}
    for key, value in sorted(config.items()):
        if "rope" in key or "rotary" in key:
            told |= _leaves(key, value)
    return told


def _leaves(name: str, value: object) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {key: text for part in value for key, text in _leaves(f"{name}.{part}", value[part]).items()}
    text = str(value)
    return {name: text if len(text) <= _MOST_TOLD_CHARS else _digest(value)}


def _portable(value: object) -> object:
    """A configuration without what depends on where it lies and who has read it."""
    if isinstance(value, Mapping):
        return {
            key: _portable(part)
            for key, part in value.items()
            if not str(key).startswith("_") and key != "transformers_version"
        }
    return [_portable(part) for part in value] if isinstance(value, list | tuple) else value


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
