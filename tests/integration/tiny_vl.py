"""A tiny Qwen3-VL: its configuration, tokenizer and processors, as a checkpoint has them; tests make the weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.engines.tiny.configs import BEGIN_ID, END_ID, PAD_ID

CONTEXT_TOKENS = 4096
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tiny_vl(folder: Path) -> None:
    """The files of the checkpoint but its weights."""
    folder.mkdir()
    write_tokenizer(folder, CONTEXT_TOKENS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _VISION])
    tokenizer.save(str(folder / "tokenizer.json"))
    start, end, image, video = (tokenizer.token_to_id(token) for token in _VISION)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said["chat_template"] = _TEMPLATE
    said["additional_special_tokens"] += _VISION
    ids = {"vision_start_token_id": start, "vision_end_token_id": end}
    _write(folder / "tokenizer_config.json", said)
    _write(
        folder / "config.json",
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "dtype": "bfloat16",
            "image_token_id": image,
            "video_token_id": video,
            **ids,
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "dtype": "bfloat16",
                "vocab_size": tokenizer.get_vocab_size(),
                "bos_token_id": BEGIN_ID,
                "eos_token_id": END_ID,
                "pad_token_id": PAD_ID,
                "hidden_size": 128,
                "intermediate_size": 256,
                "hidden_act": "silu",
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": CONTEXT_TOKENS,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1_000_000.0,
                    "mrope_section": [12, 10, 10],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "model_type": "qwen3_vl_vision",
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "out_hidden_size": 128,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
        },
    )
    pixels: dict[str, Any] = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    }
    kinds = {"processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"}
    _write(folder / "preprocessor_config.json", pixels | kinds)
    videos = {"processor_class": "Qwen3VLProcessor", "video_processor_type": "Qwen3VLVideoProcessor"}
    _write(folder / "video_preprocessor_config.json", pixels | videos)


def _write(file: Path, document: dict[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=1))
