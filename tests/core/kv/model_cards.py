"""Fields of public models' config.json, as far as sizes of caches depend on them.

Each says where its fields come from: the named file as public code repositories quote it, "aiconfigurator", a folder
of copies (see published.yaml), or "transformers", the defaults of its configuration class in 5.x, where no copy was
at hand.
"""

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"

# aiconfigurator, meta-llama--Llama-4-Scout-17B-16E-Instruct_config.json.
LLAMA_4_SCOUT: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "max_position_embeddings": 10485760,
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 16.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    "vision_config": {"num_hidden_layers": 34, "hidden_size": 1408, "num_attention_heads": 16},
}
# config.json of google/gemma-3-4b-it, which leaves out what transformers' Gemma3TextConfig has by default.
GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
# config.json of google/gemma-3-12b-it.
GEMMA_3_12B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
# config.json of google/gemma-3-27b-it.
GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
}
# config.json of google/gemma-3-1b-it.
GEMMA_3_1B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 1152,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
# config.json of google/gemma-3n-E4B-it.
GEMMA_3N_E4B: dict[str, Any] = {
    "model_type": "gemma3n",
    "text_config": {
        "model_type": "gemma3n_text",
        "head_dim": 256,
        "hidden_size": 2048,
        "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 7,
        "max_position_embeddings": 32768,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "sliding_window": 512,
    },
}
# config.json of google/gemma-4-E2B-it.
GEMMA_4_E2B: dict[str, Any] = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 1536,
        "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 7,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
    },
}
# config.json of ai21labs/Jamba-v0.1.
JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "hidden_size": 4096,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
# config.json of a Falcon-H1 (tiiuae) of 24 layers. vLLM 0.26 was seen to give its Mamba page 1,594,368 bytes in bf16.
FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1",
    "head_dim": 128,
    "hidden_size": 2048,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
}
# config.json of LiquidAI/LFM2-1.2B.
LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
}
# stepfun-ai/step3: vLLM 0.32, transformers_utils/configs/step3_vl.py, Step3TextConfig.
STEP_3: dict[str, Any] = {
    "model_type": "step3_vl",
    "text_config": {
        "model_type": "step3_text",
        "head_dim": 256,
        "hidden_size": 7168,
        "max_position_embedding": 65536,
        "num_attention_groups": 1,
        "num_attention_heads": 64,
        "num_hidden_layers": 61,
        "share_q_dim": 2048,
    },
}
# config.json of Qwen/Qwen2.5-VL-3B-Instruct, as transformers 5 writes it.
QWEN_2_5_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 2048,
        "max_position_embeddings": 128000,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rope_parameters": {"mrope_section": [16, 24, 24], "rope_type": "default"},
        "sliding_window": None,
        "use_sliding_window": False,
    },
}
# aiconfigurator, Qwen--Qwen3-VL-235B-A22B-Thinking_config.json.
QWEN_3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        "head_dim": 128,
        "hidden_size": 4096,
        "max_position_embeddings": 262144,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
        "num_key_value_heads": 4,
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
}
# config.json of zai-org/GLM-4.5V, as transformers 5 writes it.
GLM_4_5V: dict[str, Any] = {
    "model_type": "glm4v_moe",
    "text_config": {
        "model_type": "glm4v_moe_text",
        "head_dim": 128,
        "hidden_size": 4096,
        "max_position_embeddings": 65536,
        "num_attention_heads": 96,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
    },
}
# config.json of mistralai/Ministral-3-8B-Instruct-2512.
MINISTRAL_3_8B: dict[str, Any] = {
    "model_type": "mistral3",
    "text_config": {
        "model_type": "ministral3",
        "head_dim": 128,
        "hidden_size": 4096,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rope_parameters": {"factor": 16.0, "original_max_position_embeddings": 16384, "rope_type": "yarn"},
        "sliding_window": None,
    },
}
# config.json of ByteDance-Seed/Seed-OSS-36B-Instruct.
SEED_OSS: dict[str, Any] = {
    "model_type": "seed_oss",
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 524288,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
}
# meituan-longcat/LongCat-Flash-Chat: transformers, LongcatFlashConfig. The published file has no model_type.
LONGCAT_FLASH: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"],
    "head_dim": 64,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_layers": 28,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# inclusionAI/Ling-mini-2.0, of Ling-1T's family: configuration_bailing_moe_v2.py of inclusionAI/Ling-V2.
LING_MINI: dict[str, Any] = {
    "model_type": "bailing_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "max_window_layers": 20,
    "num_attention_heads": 16,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
}
# config.json of swiss-ai/Apertus-8B-Instruct-2509.
APERTUS_8B: dict[str, Any] = {
    "model_type": "apertus",
    "hidden_size": 4096,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
}
# CohereLabs' Command R7B: transformers, Cohere2Config and its page (windows of 4096 in three layers of four).
COHERE_2: dict[str, Any] = {
    "model_type": "cohere2",
    "hidden_size": 8192,
    "max_position_embeddings": 132096,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
# config.json of zai-org/GLM-5.2.
GLM_5_2: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "head_dim": 192,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": ["shared" if max(layer - 2, 0) % 4 else "full" for layer in range(78)],
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}
# config.json of microsoft/Phi-4-mini-instruct.
PHI_4_MINI: dict[str, Any] = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {"type": "longrope"},
    "sliding_window": 262144,
}
# config.json of nvidia/NVIDIA-Nemotron-Nano-9B-v2. vLLM 0.26 was seen to give its Mamba page 5,316,608 bytes.
NEMOTRON_NANO: dict[str, Any] = {
    "model_type": "nemotron_h",
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
}
