#!/usr/bin/env python3
"""Tiny checkpoints of every model family, with the logits that transformers computes for them.

    python goldens/generate/checkpoints.py [--out tests/checkpoints] [NAME ...]
    python goldens/generate/checkpoints.py --record FOLDER      # only the logits, of a model that is there

Each folder holds config.json, model.safetensors and reference.safetensors: `tokens` I32 [2, T], `logits.fp32` F32 and
`logits.<dtype>` [2, T, V], the same model in fp32 and in its own dtype; for mixtures of experts also `routing` I32
[layers, 2, T, K], the experts of the fp32 run in ascending order. A model is loaded from its folder for each run, so that nothing
but the weights is rounded: casting a model in memory rounds its rotary frequencies too.

Needs torch and transformers (the recorded files: torch 2.15.0, transformers 5.23.0), and for rwkv7, which has no config.json and
whose logits are those of that package, rwkv 0.8.32; no network. Weights are random and
larger than at the start of a training, so that attention is not flat and softcaps bend. A mixture's seed is the first
for which the run in its own dtype, and fp32 runs with noise of twice that size in every layer, choose the same experts as the
fp32 run everywhere: then an error of the logits is one of rounding, not of another choice.
"""

import argparse
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rwkv7

BASE = dict(vocab_size=160, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            tie_word_embeddings=False)
SCAN = dict(vocab_size=160, hidden_size=40, num_hidden_layers=3, num_heads=8, head_dim=10, state_size=12, chunk_size=8,
            bos_token_id=1, eos_token_id=2, pad_token_id=0)
SELECTIVE = dict(vocab_size=160, hidden_size=40, num_hidden_layers=3, bos_token_id=1, eos_token_id=2, pad_token_id=0)
HYBRID = dict(mamba_n_heads=6, mamba_d_head=16, mamba_d_state=12, mamba_chunk_size=8)
# Where a query stands at a right angle to all keys, a head is small, and a norm makes what was rounded of it as large as the
# rest: hence a wide eps, so that bounds are of rounding.
DELTA = dict(rms_norm_eps=1e-4, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12,
             linear_value_head_dim=10, layer_types=["linear_attention", "full_attention", "linear_attention"])
SPARSE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40)
TOKENS = dict(vocab_size=160, bos_token_id=1, eos_token_id=2, pad_token_id=0)
LATENT = dict(BASE, num_key_value_heads=4, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
              moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3,
              first_k_dense_replace=1)
SIGMOID = dict(num_hidden_layers=2, head_dim=16, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3,
               moe_intermediate_size=24, first_k_dense_replace=1, routed_scaling_factor=1.5)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
LONG = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
            long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0], original_max_position_embeddings=32)

# name: (class, sizes, T, dtype)
NEMOTRON_3 = dict(head_dim=16, ssm_state_size=12, mamba_num_heads=6, mamba_head_dim=16, n_groups=2, chunk_size=8, time_step_min=0.3,
                  n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, moe_shared_expert_intermediate_size=40,
                  routed_scaling_factor=2.5)
MODELS = {
    "llama3": ("Llama", dict(BASE, rope_parameters=LLAMA3), 40, "bf16"),
    "llama-linear": ("Llama", dict(BASE, num_hidden_layers=2, tie_word_embeddings=True, attention_bias=True,
                                   mlp_bias=True, rope_parameters=dict(rope_type="linear", rope_theta=10000.0,
                                                                       factor=2.5)), 24, "fp16"),
    # Longer than max_position_embeddings: the frequencies follow the length.
    "llama-dynamic": ("Llama", dict(BASE, num_hidden_layers=2, max_position_embeddings=16, rope_parameters=dict(
        rope_type="dynamic", rope_theta=10000.0, factor=3.0)), 40, "bf16"),
    "qwen2-yarn": ("Qwen2", dict(BASE, num_hidden_layers=2, rope_parameters=YARN, use_sliding_window=True,
                                 sliding_window=9, max_window_layers=1), 40, "bf16"),
    "qwen3": ("Qwen3", dict(BASE, head_dim=24, rope_parameters=dict(rope_type="default", rope_theta=1000000.0)), 40,
              "bf16"),
    "mistral": ("Mistral", dict(BASE, num_hidden_layers=2, sliding_window=7), 40, "fp32"),
    "gemma2": ("Gemma2", dict(BASE, num_hidden_layers=4, head_dim=16, sliding_window=11, query_pre_attn_scalar=24,
                              final_logit_softcapping=8.0, attn_logit_softcapping=5.0, tie_word_embeddings=True), 40,
               "bf16"),
    "olmo2": ("Olmo2", dict(BASE, num_hidden_layers=2, attention_bias=True), 24, "bf16"),
    "olmo3": ("Olmo3", dict(BASE, num_hidden_layers=4, sliding_window=9, rope_parameters=dict(
        full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=10000.0))), 40, "bf16"),
    "olmoe": ("Olmoe", dict(BASE, num_hidden_layers=2, intermediate_size=24, num_experts=8, num_experts_per_tok=3), 12, "bf16"),
    "seed-oss": ("SeedOss", dict(BASE, num_hidden_layers=2, head_dim=16, attention_out_bias=True), 24, "bf16"),
    "smollm3": ("SmolLM3", dict(BASE, num_hidden_layers=3, no_rope_layer_interval=2, use_sliding_window=True,
                                sliding_window=9, tie_word_embeddings=True), 24, "bf16"),
    "exaone4": ("Exaone4", dict(BASE, num_hidden_layers=4, sliding_window=9, sliding_window_pattern=2), 24, "bf16"),
    "gemma3": ("Gemma3", dict(BASE, num_hidden_layers=3, head_dim=16, sliding_window=9, query_pre_attn_scalar=24,
                              layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                              tie_word_embeddings=True, rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=2.0),
        sliding_attention=dict(rope_type="default", rope_theta=10000.0))), 40, "bf16"),
    "glm4": ("Glm4", dict(BASE, num_hidden_layers=2, head_dim=16, rms_norm_eps=1e-5), 24, "bf16"),
    "ernie4-5": ("Ernie4_5", dict(BASE, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True), 24, "bf16"),
    "granite": ("Granite", dict(BASE, num_hidden_layers=2, embedding_multiplier=6.0, residual_multiplier=0.3,
                                attention_multiplier=0.2, logits_scaling=3.0), 24, "bf16"),
    "lfm2": ("Lfm2", dict(BASE, num_hidden_layers=4, intermediate_size=96, block_multiple_of=8, conv_bias=True,
                          layer_types=["conv", "full_attention", "conv", "conv"]), 24, "bf16"),
    "lfm2-moe": ("Lfm2Moe", dict(BASE, num_hidden_layers=3, num_dense_layers=1, num_experts=8, num_experts_per_tok=3,
                                 moe_intermediate_size=24, layer_types=["conv", "full_attention", "conv"]), 12, "bf16"),
    "mamba": ("Mamba", dict(SELECTIVE, state_size=6), 24, "bf16"),
    "falcon-mamba": ("FalconMamba", dict(SELECTIVE, expand=16, intermediate_size=72, state_size=12, time_step_rank=7, conv_kernel=3,
                                         use_bias=True, mixer_rms_eps=1e-2, tie_word_embeddings=False), 24, "bf16"),
    "jamba": ("Jamba", dict(BASE, intermediate_size=24, attn_layer_period=3, attn_layer_offset=0, num_experts=6, num_experts_per_tok=2,
                            mamba_d_state=6, mamba_dt_rank=5), 12, "bf16"),
    "mamba2": ("Mamba2", dict(SCAN, n_groups=2, use_bias=True, time_step_limit=(0.1, 1.5)), 24, "bf16"),
    "bamba": ("Bamba", dict(BASE, **HYBRID, mamba_n_groups=2, attn_layer_indices=[1]), 24, "bf16"),
    "granite-4": ("GraniteMoeHybrid", dict(BASE, **HYBRID, num_local_experts=0, num_experts_per_tok=0, position_embedding_type="nope",
                                           layer_types=["linear_attention", "full_attention", "linear_attention"],
                                           shared_intermediate_size=64, embedding_multiplier=6.0, residual_multiplier=0.4,
                                           attention_multiplier=0.2, logits_scaling=2.0, tie_word_embeddings=True), 24, "bf16"),
    "granite-4-moe": ("GraniteMoeHybrid", dict(BASE, **HYBRID, num_hidden_layers=2, intermediate_size=24, num_local_experts=8,
                                               num_experts_per_tok=3, layer_types=["linear_attention", "full_attention"],
                                               position_embedding_type="rope", shared_intermediate_size=40, embedding_multiplier=6.0,
                                               residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=2.0), 12, "bf16"),
    "nemotron-h": ("NemotronH", dict(BASE, head_dim=16, ssm_state_size=12, mamba_num_heads=6, mamba_head_dim=16, n_groups=2,
                                     chunk_size=8, time_step_min=0.3, layers_block_type=[
        "linear_attention", "mlp", "full_attention", "linear_attention"]), 24, "bf16"),
    "nemotron-3": ("NemotronH", dict(BASE, **NEMOTRON_3, moe_latent_size=None, layers_block_type=[
        "linear_attention", "moe", "full_attention"]), 12, "bf16"),
    "nemotron-3-latent": ("NemotronH", dict(BASE, **NEMOTRON_3, moe_latent_size=32, mlp_bias=True, n_group=4, topk_group=2,
                                            layers_block_type=["moe", "full_attention"]), 12, "bf16"),
    "falcon-h1": ("FalconH1", dict(BASE, **HYBRID, num_hidden_layers=2, mamba_d_ssm=96, mamba_n_groups=2, embedding_multiplier=3.0,
                                   lm_head_multiplier=0.6, mlp_multipliers=[0.7, 0.8], key_multiplier=0.6, attention_in_multiplier=1.2,
                                   attention_out_multiplier=0.8, ssm_multipliers=[0.5, 1.5, 0.8, 1.3, 0.6], ssm_in_multiplier=1.3,
                                   ssm_out_multiplier=0.7), 24, "bf16"),
    "falcon-h1-norm": ("FalconH1", dict(BASE | HYBRID | dict(num_hidden_layers=1, hidden_size=40, mamba_n_heads=5), mamba_d_ssm=None,
                                        mamba_rms_norm=True, mamba_n_groups=5, head_dim=12), 24, "bf16"),
    # Two shared blocks, each used twice.
    "zamba2": ("Zamba2", dict(TOKENS, hidden_size=32, intermediate_size=40, num_hidden_layers=5, num_attention_heads=4,
                              max_position_embeddings=64, mamba_d_state=8, n_mamba_heads=8, mamba_ngroups=2, chunk_size=8,
                              time_step_min=0.3, num_mem_blocks=2, use_shared_attention_adapter=True, adapter_rank=6,
                              use_mem_rope=True, layers_block_type=["hybrid", "linear_attention"] + ["hybrid"] * 3), 24, "bf16"),
    "qwen3-next": ("Qwen3Next", dict(BASE, **DELTA, **SPARSE, head_dim=16, mlp_only_layers=[0]), 12, "bf16"),
    "qwen3-5": ("Qwen3_5", dict(BASE, **DELTA, head_dim=16, attention_bias=True, tie_word_embeddings=True), 24, "bf16"),
    "qwen3-5-moe": ("Qwen3_5Moe", dict(BASE, **DELTA, **dict(SPARSE, num_experts=5, num_experts_per_tok=2), head_dim=16), 12, "bf16"),
    "olmo-hybrid": ("OlmoHybrid", dict(BASE, **dict(DELTA, linear_value_head_dim=24), rope_parameters=dict(rope_type="default", rope_theta=None)), 24, "bf16"),
    "kimi-linear": ("KimiLinear", dict(LATENT, rms_norm_eps=1e-3, q_lora_rank=None, n_routed_experts=None, num_local_experts=6, n_shared_experts=1,
                                       linear_num_heads=3, linear_head_dim=16, layer_types=["linear_attention", "full_attention",
                                                                                            "linear_attention"]), 12, "bf16"),
    "arcee": ("Arcee", dict(BASE, num_hidden_layers=2, head_dim=16, mlp_bias=True), 24, "bf16"),
    "starcoder2": ("Starcoder2", dict(BASE, num_hidden_layers=2, sliding_window=9, tie_word_embeddings=True), 24, "bf16"),
    "gpt2": ("GPT2", dict(TOKENS, n_embd=48, n_layer=3, n_head=4, n_positions=64, n_inner=80,
                          scale_attn_by_inverse_layer_idx=True), 40, "bf16"),
    "gpt-neox": ("GPTNeoX", dict(TOKENS, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
                                 max_position_embeddings=64, rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)), 40, "bf16"),
    "cohere2": ("Cohere2", dict(BASE, num_hidden_layers=4, sliding_window=9, logit_scale=0.5, tie_word_embeddings=True,
                                layer_types=["sliding_attention", "full_attention"] * 2), 24, "bf16"),
    "nemotron": ("Nemotron", dict(BASE, num_hidden_layers=2, head_dim=16, attention_bias=True), 24, "bf16"),
    "ministral3": ("Ministral3", dict(BASE, num_hidden_layers=2, head_dim=16, rope_parameters=dict(
        YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)), 40, "bf16"),
    # Inputs so wide that gelu lets something of each through: what a norm makes of next to nothing is mostly rounding.
    "gemma4": ("Gemma4", dict(BASE, num_hidden_layers=5, intermediate_size=40, head_dim=12, global_head_dim=16, vocab_size_per_layer_input=160,
                              hidden_size_per_layer_input=16, num_kv_shared_layers=2, use_double_wide_mlp=True, sliding_window=9,
                              layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                              final_logit_softcapping=8.0, tie_word_embeddings=True), 24, "bf16"),
    "gemma4-moe": ("Gemma4", dict(BASE, num_hidden_layers=2, head_dim=12, global_head_dim=16, hidden_size_per_layer_input=0, attention_k_eq_v=True,
                                  num_global_key_value_heads=1, enable_moe_block=True, num_experts=6, top_k_experts=2,
                                  moe_intermediate_size=24, sliding_window=9,
                                  layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True), 12, "bf16"),
    "llama4": ("Llama4", dict(BASE, num_hidden_layers=3, head_dim=16, intermediate_size=24, intermediate_size_mlp=80, num_local_experts=6,
                              num_experts_per_tok=2, moe_layers=[1, 2], no_rope_layers=[1, 0, 1], attention_chunk_size=5, floor_scale=4,
                              attn_scale=0.3, rope_parameters=LLAMA3), 12, "bf16"),
    "apertus": ("Apertus", dict(BASE, num_hidden_layers=2, attention_bias=True, rope_parameters=LLAMA3), 24, "bf16"),
    "rwkv7": ("Rwkv7", rwkv7.SIZES, 24, "bf16"),
    "phi3": ("Phi3", dict(BASE, original_max_position_embeddings=32, rope_parameters=LONG), 40, "bf16"),
    "phi3-short": ("Phi3", dict(BASE, num_hidden_layers=2, original_max_position_embeddings=32, sliding_window=10,
                                rope_parameters=LONG), 24, "bf16"),
    "phi3-partial": ("Phi3", dict(BASE, num_hidden_layers=2, rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)), 24, "bf16"),
    # Wide enough that more than one logit counts for some weights, and so narrow that few lie near its border.
    "phimoe": ("Phimoe", dict(BASE, num_hidden_layers=2, intermediate_size=24, num_local_experts=6, router_jitter_noise=0.1,
                              attention_bias=True, lm_head_bias=True, rope_parameters=dict(LONG, short_mscale=1.1, long_mscale=1.3)),
               8, "bf16"),
    "mixtral": ("Mixtral", dict(BASE, num_hidden_layers=2, num_local_experts=6, num_experts_per_tok=2,
                                sliding_window=None), 12, "bf16"),
    "qwen3-moe": ("Qwen3Moe", dict(BASE, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
                                   norm_topk_prob=True, mlp_only_layers=[0], decoder_sparse_step=1), 12, "bf16"),
    "qwen2-moe": ("Qwen2Moe", dict(BASE, num_hidden_layers=2, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
                                   shared_expert_intermediate_size=40), 12, "bf16"),
    "granite-moe": ("GraniteMoe", dict(BASE, num_hidden_layers=2, intermediate_size=24, num_local_experts=8, num_experts_per_tok=3,
                                       embedding_multiplier=6.0, residual_multiplier=0.3, attention_multiplier=0.2,
                                       logits_scaling=3.0), 12, "bf16"),
    "hunyuan-dense": ("HunYuanDenseV1", dict(BASE, num_hidden_layers=2, head_dim=16, rope_parameters=dict(
        rope_type="dynamic", rope_theta=10000.0, factor=1.0, alpha=50.0)), 24, "bf16"),
    "hunyuan-moe": ("HunYuanMoEV1", dict(BASE, num_hidden_layers=2, head_dim=16, intermediate_size=24, num_experts=8, moe_topk=3),
                    12, "bf16"),
    "glm4-moe": ("Glm4Moe", dict(BASE, **SIGMOID, attention_bias=True, use_qk_norm=True), 12, "bf16"),
    "minimax-m2": ("MiniMaxM2", dict(BASE, num_hidden_layers=2, head_dim=16, intermediate_size=24, num_local_experts=8,
                                     num_experts_per_tok=2, rope_parameters=dict(
        rope_type="default", rope_theta=5000000.0, partial_rotary_factor=0.5)), 12, "bf16"),
    # A limit that gates and ups of random weights reach.
    "gpt-oss": ("GptOss", dict(BASE, num_hidden_layers=2, head_dim=16, intermediate_size=24, num_local_experts=8,
                               num_experts_per_tok=3, sliding_window=5, swiglu_limit=1.25, rope_parameters=dict(YARN, truncate=False)),
                12, "bf16"),
    "ernie4-5-moe": ("Ernie4_5_Moe", dict(BASE, num_hidden_layers=2, moe_num_experts=8, moe_k=3, moe_intermediate_size=24,
                                          moe_num_shared_experts=1, tie_word_embeddings=True), 12, "bf16"),
    "dots1": ("Dots1", dict(BASE, **SIGMOID, norm_topk_prob=True, sliding_window=9, max_window_layers=1), 12, "bf16"),
    "deepseek-v2": ("DeepseekV2", dict(LATENT, q_lora_rank=None, n_group=4, topk_group=2,
                                       topk_method="group_limited_greedy", routed_scaling_factor=1.5), 12, "bf16"),
    # So few keys that queries do not see all, and so many heads that few scores are 0.
    "deepseek-v3-2": ("DeepseekV32", dict(LATENT, q_lora_rank=20, n_group=4, topk_group=2, routed_scaling_factor=2.5, num_hidden_layers=2,
                                          index_topk=5, index_n_heads=8, index_head_dim=12), 12, "bf16"),
    "deepseek-v3": ("DeepseekV3", dict(LATENT, q_lora_rank=20, n_group=4, topk_group=2, routed_scaling_factor=2.5,
                                       num_hidden_layers=2, rope_parameters=dict(YARN, mscale=0.7, mscale_all_dim=1.0)), 12, "bf16"),
}
# Ends of the names of the modules that choose experts.
ROUTERS = ("TopKRouter", "TopkRouter", "V1Gate", "Llama4Router", "TextRouter", "Indexer")
# Where a text model has a config of its own.
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig", "Llama4": "Llama4TextConfig", "Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}
# Where it is not called KindForCausalLM.
CLASSES = {"GPT2": "GPT2LMHeadModel"}
# What random weights of a family are multiplied with, by the ends of their names. All that a layer of Zamba2 reads has gone through
# a norm, and nothing goes around its attention: an error of rounding would grow from layer to layer.
CALMER = {"zamba2": {"q_proj.weight": 0.4, "k_proj.weight": 0.4, ".1.weight": 0.5, ".linear.weight": 0.4, "in_proj.weight": 0.4, ".D": 6.0}}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def weights(model, generator):
    """Random weights: matrices of a gain of 1 (queries and keys more, so that attention chooses), norms around 1 (or 0 where the model adds 1), biases of 0.2."""
    offset = model.config.model_type in ("gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    # Matrices of all experts, or all of blocks.
    transposed = {"gpt2": ".h.", "gpt_oss": ".experts.", "llama4_text": ".experts."}.get(model.config.model_type)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("bias"):
                tensor.copy_(noise * 0.1)
            elif "norm" in name or ".ln_" in name:
                # A norm before a gate adds nothing.
                tensor.copy_(noise * 0.2 + (0.0 if offset and "linear_attn" not in name else 1.0))
                if model.config.model_type == "gemma4_text" and name.endswith("q_norm.weight"):
                    # Its scores have no factor but this.
                    tensor.mul_(0.3)
            elif any(table in name for table in ("embed_tokens", "wte", "wpe", "embed_in", "embeddings")):
                tensor.copy_(noise * 0.5)
            elif "conv1d" in name and model.config.model_type in ("olmo_hybrid", "kimi_linear"):
                # Its norm before a gate has an eps of its own. What silu makes of large numbers is mostly above 0, so that few
                # queries stand at a right angle to keys.
                tensor.copy_(noise * 2.0)
            elif "act_fn" in name:
                if "alpha" in name:
                    tensor.copy_(noise * 0.5)
            elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
                tensor.copy_(noise * 0.2 + 1.0)
            elif name.endswith("sinks"):
                tensor.copy_(noise * 1.5)
            elif name.endswith(("mlp.gate.weight", "feed_forward.gate.weight", "mlp.gate.wg.weight", "router.weight", "router.proj.weight",
                                "mixer.gate.weight")):
                tensor.copy_(noise * 0.6)
            else:
                sharp = name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight", "q_b_proj.weight", "c_attn.weight",
                                       "query_key_value.weight"))
                inputs = tensor.shape[-2 if transposed and transposed in name else -1]
                calmer = CALMER.get(model.config.model_type, {}).items()
                gain = (1.6 if sharp else 1.0) * next((factor for end, factor in calmer if name.endswith(end)), 1.0)
                tensor.copy_(noise * gain / inputs ** 0.5)


def experts_of(router, output):
    """The experts that a router chose, in ascending order."""
    # That of Llama 4 gives the scores of all, and its logits.
    chosen = output[-1].topk(router.top_k, dim=-1).indices if type(router).__name__ == "Llama4Router" else output[-1]
    return chosen.sort(dim=-1).values


class Choices:
    """What the routers of a model chose, layer after layer, and which keys its indexers did, behind the experts of the next router."""

    def __init__(self):
        self.made, self.keys = [], []

    def note(self, module, args, output):
        if type(module).__name__.endswith("Indexer"):
            queries = output.shape[1]
            # What stands behind a query is no choice.
            chosen = torch.zeros(len(output), queries, queries).scatter(-1, output.long(), 1).tril()
            self.keys.append(chosen.long().flatten(0, 1))
            return
        own = choices_of(module, output)
        self.made.append(torch.cat([own.reshape(-1, own.shape[-1]), *self.keys], -1))
        self.keys = []

    def all(self, shape):
        """By layer, and those of tokens of this shape; None where there are no routers."""
        widest = max((made.shape[-1] for made in self.made), default=0)
        padded = [torch.nn.functional.pad(made, (0, widest - made.shape[-1])).reshape(*shape, -1) for made in self.made]
        return torch.stack(padded) if padded else None


def choices_of(router, output):
    """What a rounding may decide otherwise: the experts, and by sparsemixer their order and which logits it leaves out of the weight of
    each."""
    chosen = experts_of(router, output)
    if type(router).__name__ != "PhimoeTopKRouter":
        return chosen
    logits, _, selected = output
    top, logits = logits.gather(-1, selected)[..., None], logits[..., None, :]
    far = (top - logits) / torch.maximum(logits.abs(), top) > 2 * router.router_jitter_noise
    return torch.cat([chosen, selected, far.flatten(-2).long()], -1)


def run(folder, tokens, dtype, noise=None):
    """Logits of the model in `folder`, and the choices of every router, its experts in ascending order first."""
    if rwkv7.is_one(folder):
        logits, own = rwkv7.Reference(folder, dtype)(tokens).logits, rwkv7.Model(folder, dtype)(tokens).logits.detach()
        assert torch.equal(logits, own.float()), "the copy of the package computes something else"
        return logits, None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    chosen = Choices()

    def disturb(module, args, output):
        return output * (1 + torch.randn(output.shape, generator=noise) / 128)

    # An indexer stands before the first layer's end.
    indexes = model.config.model_type == "deepseek_v32"
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith(ROUTERS):
            module.register_forward_hook(chosen.note)
        elif noise and (kind.endswith("DecoderLayer") or indexes and kind == "Embedding"):
            module.register_forward_hook(disturb)
    with torch.no_grad():
        logits = model(tokens).logits
    return logits, chosen.all(tokens.shape)


def save(model, folder):
    """The folder of a model. That of OLMo Hybrid as published ones are: transformers cuts the convolution of a layer into thirds,
    whatever the widths, and calls a norm of layers that attend as one of the others. That of Kimi Linear too: transformers calls an
    MLP as if it were of experts."""
    model.save_pretrained(folder)
    c, path = model.config, folder / "model.safetensors"
    if c.model_type not in ("olmo_hybrid", "kimi_linear"):
        return
    tensors = load_file(path)
    if c.model_type == "kimi_linear":
        for number in (i for i, kind in enumerate(c.mlp_layer_types) if kind == "dense"):
            for part in ("gate", "up", "down"):
                name = f"model.layers.{number}.block_sparse_moe.{part}_proj.weight"
                tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
        save_file(tensors, path, metadata={"format": "pt"})
        return
    keys, values = (getattr(c, f"linear_num_{of}_heads") * getattr(c, f"linear_{of}_head_dim") for of in ("key", "value"))
    for number, kind in enumerate(c.layer_types):
        layer = f"model.layers.{number}."
        if kind == "full_attention":
            tensors[f"{layer}post_attention_layernorm.weight"] = tensors.pop(f"{layer}feedforward_layer_norm.weight")
            continue
        names = [f"{layer}linear_attn.{of}_conv1d.weight" for of in "qkv"]
        parts = torch.cat([tensors[name] for name in names]).split([keys, keys, values])
        tensors |= {name: part.clone() for name, part in zip(names, parts)}
    save_file(tensors, path, metadata={"format": "pt"})


def make(name, out):
    kind, sizes, length, stored = MODELS[name]
    folder = out / name
    for seed in range(500):
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(1000 + seed)
        if kind == "Rwkv7":
            rwkv7.make(folder, sizes, generator)
        else:
            config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**sizes)
            model = getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))(config)
            weights(model, generator)
            save(model.to(DTYPES[stored]), folder)
        tokens = torch.randint(3, sizes["vocab_size"], (2, length), generator=generator)
        fp32, routing = run(folder, tokens, torch.float32)
        own = "fp16" if stored == "fp16" else "bf16"
        low, low_routing = run(folder, tokens, DTYPES[own])
        if routing is None or torch.equal(routing, low_routing) and all(
                torch.equal(routing, run(folder, tokens, torch.float32, generator)[1]) for _ in range(8)):
            break
    else:
        raise SystemExit(f"{name}: no seed below 500 routes the same in fp32 and {own}")
    record = {"tokens": tokens.to(torch.int32), "logits.fp32": fp32.contiguous(), f"logits.{own}": low.contiguous()}
    if routing is not None:
        experts = routing[..., :sizes.get("num_experts_per_tok", 2)] if kind in ("Phimoe", "DeepseekV32") else routing
        record["routing"] = experts.to(torch.int32).contiguous()
    save_file(record, folder / "reference.safetensors", metadata=VERSIONS)
    error = (low.float() - fp32).abs()
    ours, theirs = (x.float().log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]) for x in (low, fp32))
    print(f"{name}: seed {seed}, largest logit {fp32.abs().max():.3f}, rms of {own} {error.square().mean().sqrt():.2e}, "
          f"largest {error.max():.2e}, dlogp {(ours - theirs).abs().max():.3f}, "
          f"{sum(f.stat().st_size for f in folder.iterdir()) // 1024} KiB")


VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


def record(folder):
    """Records logits and hidden states of a bf16 model that is there, for the tokens that it was recorded with."""
    path = folder / "reference.safetensors"
    tokens = load_file(path)["tokens"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        found = model(tokens.long(), output_hidden_states=True)
    kept = {f"hidden.{i}": hidden.contiguous() for i, hidden in enumerate(found.hidden_states)}
    kept["tokens"], kept["logits.fp32"] = tokens, found.logits.contiguous()
    kept["logits.bf16"], _ = run(folder, tokens.long(), torch.bfloat16)
    save_file(kept, path, metadata=VERSIONS)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/checkpoints"))
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of " + ", ".join(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.record:
        return record(args.record)
    for name in args.names or MODELS:
        make(name, args.out)


if __name__ == "__main__":
    main()
