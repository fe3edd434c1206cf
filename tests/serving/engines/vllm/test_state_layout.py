"""Pages of linear states, in vLLM's own shapes: rows of drafts are behind what a prompt leaves, and stay."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.page_layout import PageLayout, wire_forms
from prfaas.serving.engines.vllm.state_layout import state_parts

GDN, MAMBA2 = MambaAttentionBackendEnum.GDN_ATTN, MambaAttentionBackendEnum.MAMBA2


def spec_of(kind: str, drafts: int) -> MambaSpec:
    calculator = MambaStateShapeCalculator
    shapes: Any
    if kind == "mamba2":
        shapes = calculator.mamba2_state_shape(1, 8 * 16, 2, 8, 16, 32, 4, num_spec=drafts)
    elif kind == "kda":
        shapes = calculator.kda_state_shape(1, 8, 16, conv_kernel_size=4, num_spec=drafts)
    else:
        shapes = calculator.gated_delta_net_state_shape(1, 4, 8, 16, 32, 4, num_spec=drafts)
    return MambaSpec(
        block_size=64,
        shapes=shapes,
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MAMBA2 if kind == "mamba2" else GDN,
        num_speculative_blocks=drafts,
    )


def page_of(spec: MambaSpec) -> PageLayout:
    return PageLayout(GroupKind.STATE, 64, 64, spec.state_content_size_bytes, state_parts(spec))


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_engines_with_unlike_numbers_of_drafts_agree(
    kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
    plain, drafting = page_of(spec_of(kind, 0)), page_of(spec_of(kind, 3))
    assert plain.page_bytes < drafting.page_bytes
    (form,) = wire_forms([drafting], [plain], "east", "home", sends=True)
    assert form is not None
    # As much as a page without drafts, and each byte of it once.
    assert sum(part.heads * part.rows * part.width_bytes for part in form.parts) == plain.page_bytes
    starts = [
        (part.offset_bytes + head * part.head_stride_bytes + row * part.row_stride_bytes, part.width_bytes)
        for part in plain.parts
        for head in range(part.heads)
        for row in range(part.rows)
    ]
    covered = sorted(byte for start, width in starts for byte in range(start, start + width))
    assert covered == list(range(plain.page_bytes))


def test_states_with_records_of_drafts_are_not_known() -> None:
    spec = spec_of("kda", 2)
    record = replace(spec, shapes=(*spec.shapes, (8, 3, 16), (8, 3, 16)), dtypes=(*spec.dtypes, *spec.dtypes))
    assert state_parts(spec) and not state_parts(record)
