"""From a GGUF file to a checkpoint: a small one of each architecture is written, and what it says comes out again."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

from prfaas.serving.engines.tiny.checkpoint import byte_symbols
from prfaas.serving.engines.trained.gguf_tokenizer import write_tokenizer
from prfaas.serving.engines.trained.gguf_weights import gguf_weights

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32


def reader_of(
    path: Path, architecture: str, tensors: dict[str, torch.Tensor], fields: dict[str, object]
) -> GGUFReader:
    writer = GGUFWriter(path, architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(512)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for name, value in fields.items():
        add[type(value)](f"tokenizer.{name}", value)  # type: ignore[operator]
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFReader(path)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2i of a head is the i-th of its first half, row 2i + 1 that of its second: as llama.cpp turns them."""
    rows = []
    for head in weight.split(weight.shape[0] // heads):
        half = head.shape[0] // 2
        for i in range(half):
            rows += [head[i], head[half + i]]
    return torch.stack(rows)


def test_llamas_rotary_rows_stand_as_halves_again(tmp_path: Path) -> None:
    torch.manual_seed(1)
    query = torch.randn(HEADS * HEAD_DIM, HIDDEN).bfloat16().float()
    key = torch.randn(KV_HEADS * HEAD_DIM, HIDDEN).bfloat16().float()
    value = torch.randn(KV_HEADS * HEAD_DIM, HIDDEN).bfloat16().float()
    norm = torch.randn(HIDDEN).bfloat16().float()
    tensors = {
        "token_embd.weight": value,
        "blk.3.attn_q.weight": interleaved(query, HEADS),
        "blk.3.attn_k.weight": interleaved(key, KV_HEADS),
        "blk.3.attn_v.weight": value,
        "blk.3.ffn_norm.weight": norm,
    }
    found = gguf_weights(reader_of(tmp_path / "m.gguf", "llama", tensors, {}))
    layer = "model.layers.3"
    expected = {
        "model.embed_tokens.weight": value,
        f"{layer}.self_attn.q_proj.weight": query,
        f"{layer}.self_attn.k_proj.weight": key,
        f"{layer}.self_attn.v_proj.weight": value,
        f"{layer}.post_attention_layernorm.weight": norm,
    }
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name].float(), tensor), name


def test_gemmas_norms_lose_the_one_and_its_rows_stay(tmp_path: Path) -> None:
    torch.manual_seed(2)
    query = torch.randn(HEADS * HEAD_DIM, HIDDEN).bfloat16().float()
    norm = (torch.randn(HIDDEN) / 4).bfloat16().float()
    tensors = {
        "output_norm.weight": norm + 1,
        "blk.0.attn_q.weight": query,
        "blk.0.ffn_norm.weight": norm + 1,
        "blk.0.post_attention_norm.weight": norm + 1,
        "blk.0.post_ffw_norm.weight": norm + 1,
        "blk.0.attn_q_norm.weight": norm + 1,
    }
    found = gguf_weights(reader_of(tmp_path / "m.gguf", "gemma3", tensors, {}))
    layer = "model.layers.0"
    norms = {
        "model.norm.weight",
        f"{layer}.pre_feedforward_layernorm.weight",
        f"{layer}.post_attention_layernorm.weight",
        f"{layer}.post_feedforward_layernorm.weight",
        f"{layer}.self_attn.q_norm.weight",
    }
    assert found.keys() == {*norms, f"{layer}.self_attn.q_proj.weight"}
    assert torch.equal(found[f"{layer}.self_attn.q_proj.weight"].float(), query)
    for name in norms:
        assert torch.equal(found[name], (norm + 1 - 1).bfloat16()), name


def test_quantized_blocks_are_what_gguf_says_they_are(tmp_path: Path) -> None:
    torch.manual_seed(3)
    blocks = quantize(torch.randn(8, HIDDEN).numpy(), GGMLQuantizationType.Q8_0)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_tensor("output_norm.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q8_0)).bfloat16()
    assert torch.equal(gguf_weights(GGUFReader(tmp_path / "m.gguf"))["model.norm.weight"], expected)


@pytest.mark.parametrize(
    ("architecture", "tensor", "said"),
    [
        ("llama", "blk.0.attn_q_norm.weight", r"the tensor blk\.0\.attn_q_norm\.weight"),
        ("llama", "blk.x.attn_q.weight", "the tensor blk.x"),
        ("gemma3", "rope_freqs.weight", "the tensor rope_freqs"),
        ("mamba", "output_norm.weight", "a GGUF file of mamba; known are llama, gemma3"),
    ],
)
def test_what_is_not_known_is_refused(architecture: str, tensor: str, said: str, tmp_path: Path) -> None:
    reader = reader_of(tmp_path / "m.gguf", architecture, {tensor: torch.ones(HIDDEN)}, {})
    with pytest.raises(ValueError, match=said):
        gguf_weights(reader)


def test_every_digit_is_a_token_of_its_own(tmp_path: Path) -> None:
    """A vocabulary with the merge of two digits: GPT-2's pre-tokenizer alone would use it."""
    tokens = ["<end>", *byte_symbols(), "12", "\u0120\u0120", "ab"]
    fields: dict[str, object] = {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "ggml.merges": ["1 2", "\u0120 \u0120", "a b"],
        "ggml.add_bos_token": False,
        "chat_template": "{{ messages }}",
        **{f"ggml.{role}_token_id": 0 for role in ("bos", "eos", "unknown", "padding")},
    }
    write_tokenizer(reader_of(tmp_path / "m.gguf", "llama", {"x": torch.ones(1)}, fields), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("ab12  3<end>").tokens == ["ab", "1", "2", "\u0120\u0120", "3", "<end>"]
    assert tokenizer.decode(tokenizer.encode("ab12  3\u4e2d").ids) == "ab12  3\u4e2d"
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    fields: dict[str, object] = {"ggml.model": "gpt2", "ggml.pre": "qwen2"}
    reader = reader_of(tmp_path / "m.gguf", "llama", {"x": torch.ones(1)}, fields)
    with pytest.raises(ValueError, match="a tokenizer of the kind gpt2, qwen2"):
        write_tokenizer(reader, tmp_path)
