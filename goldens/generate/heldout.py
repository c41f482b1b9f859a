#!/usr/bin/env python3
"""Gradients of models that are not in the repository: against torch's, and the same bits in every way to run.

    python goldens/generate/heldout.py [--samebits PROGRAM] [--work DIR] [--batches N] [FAMILY[:NUMBER] ...]

For every family three tiny models with random weights in shapes of their own (`SHAPES`: odd sizes, other heads, tied and not,
windows, biases, other positions), each with some batches of sequences and masks. Of each model and loss one line: the
largest ratio, over parameters, of the error of samebits' bf16 gradient to that of torch's bf16, both against torch's fp32
and both root mean squares over the batches, with the parameter and its median over the batches (the error of a log-probability is
one draw that a whole sequence shares, so one of few batches may be large by chance: far apart, the two say that it was); the largest error of samebits' fp32 gradient as a share of its
length; and in how many ways to run the gradient file has the bytes of the plain way. Exit code 1 where a ratio is above 1, an
error above 1e-4 or a file differs. Routing is the same in all runs: a sequence is drawn again where torch's two runs, or its
fp32 under noise, choose other experts, as in gradients.py, and where samebits does in bf16 or fp32. Of those that torch is sure
of there is a line that says how many samebits chose otherwise for; more than a few end the run. So it is with tokens whose
ratio is clipped in one run and not in another. Nothing is recorded. Needs
torch and transformers; no network.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch
import transformers
from safetensors.torch import load_file, save_file

import checkpoints
import gradients
import rwkv7

SEQUENCES = 8
# Of the sequences whose experts torch is sure of, the share for which samebits may choose others.
OTHERS = 0.05
COMMON = dict(max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
# Sizes that all families take, by number.
SIZES = [
    dict(hidden_size=50, intermediate_size=70, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1,
         vocab_size=101, tie_word_embeddings=True),
    dict(hidden_size=66, intermediate_size=131, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3,
         vocab_size=203, tie_word_embeddings=False),
    dict(hidden_size=72, intermediate_size=77, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
         vocab_size=97, tie_word_embeddings=False),
]
LATENT = dict(moe_intermediate_size=26, first_k_dense_replace=1)
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=34, mlp_only_layers=[], decoder_sparse_step=1)
SIGMOID = dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=26,
               first_k_dense_replace=1, routed_scaling_factor=1.3)
ALONE = dict.fromkeys(["num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"])
SCAN = dict(mamba_d_state=10, mamba_chunk_size=4)
DELTA = dict(rms_norm_eps=1e-4, layer_types=["linear_attention", "full_attention"])
# Without tied tables transformers gives each use of a shared block weights of its own.
ZAMBA = dict(mamba_d_state=10, chunk_size=4, adapter_rank=5, tie_word_embeddings=True)
NEMOTRON = dict(head_dim=14, ssm_state_size=10, mamba_num_heads=6, mamba_head_dim=12, chunk_size=4)
KIMI = dict(rms_norm_eps=1e-3, tie_word_embeddings=False, q_lora_rank=None, kv_lora_rank=18, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=9, num_experts_per_tok=2,
            moe_intermediate_size=26)
ROPE = lambda theta: dict(rope_type="default", rope_theta=theta)
BY_TYPE = lambda full, sliding: dict(full_attention=full, sliding_attention=sliding)
SHAPES = {
    "Qwen3": [dict(head_dim=14, rope_parameters=ROPE(1e6)), dict(head_dim=22, rope_parameters=ROPE(5e4)),
              dict(head_dim=10, rope_parameters=ROPE(1e4), attention_bias=True)],
    "Qwen2": [dict(rope_parameters=ROPE(1e6)), dict(rope_parameters=ROPE(1e4), use_sliding_window=True, sliding_window=5,
                                                    max_window_layers=1),
              dict(rope_parameters=dict(checkpoints.YARN, factor=2.0))],
    "Llama": [dict(attention_bias=True), dict(mlp_bias=True, rope_parameters=ROPE(5e5)),
              dict(rope_parameters=dict(checkpoints.LLAMA3, factor=4.0))],
    "Mistral": [dict(sliding_window=3, head_dim=18), dict(sliding_window=9), dict(sliding_window=None, head_dim=20)],
    "Gemma2": [dict(head_dim=12, sliding_window=4, query_pre_attn_scalar=17, final_logit_softcapping=5.0,
                    attn_logit_softcapping=3.0),
               dict(head_dim=22, sliding_window=7, query_pre_attn_scalar=22, final_logit_softcapping=20.0,
                    attn_logit_softcapping=30.0, tie_word_embeddings=True),
               dict(head_dim=10, sliding_window=30, query_pre_attn_scalar=40, final_logit_softcapping=8.0,
                    attn_logit_softcapping=6.0, tie_word_embeddings=True)],
    "Olmo2": [dict(rope_parameters=ROPE(1e4)), dict(attention_bias=True, rope_parameters=ROPE(5e5)),
              dict(rms_norm_eps=1e-4)],
    "Olmo3": [dict(sliding_window=5, rope_parameters=BY_TYPE(ROPE(1e4), ROPE(5e5))),
              dict(sliding_window=3, layer_types=["full_attention", "sliding_attention", "full_attention"],
                   rope_parameters=BY_TYPE(dict(checkpoints.YARN, factor=2.0), ROPE(1e4))),
              dict(sliding_window=9, attention_bias=True, rope_parameters=BY_TYPE(ROPE(1e5), ROPE(1e5)))],
    "Olmoe": [dict(num_experts=4, num_experts_per_tok=2), dict(num_experts=5, num_experts_per_tok=3, norm_topk_prob=True),
              dict(num_experts=6, num_experts_per_tok=2)],
    "SeedOss": [dict(head_dim=14), dict(head_dim=20, attention_out_bias=True), dict(head_dim=12, attention_bias=False)],
    "SmolLM3": [dict(no_rope_layer_interval=2), dict(no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=4),
                dict(attention_bias=True, no_rope_layers=[1, 0])],
    "Exaone4": [dict(sliding_window=5, sliding_window_pattern=2), dict(sliding_window=None, layer_types=["full_attention"] * 3),
                dict(sliding_window=3, layer_types=["full_attention", "sliding_attention"])],
    "Gemma3": [dict(head_dim=12, sliding_window=4, query_pre_attn_scalar=17, sliding_window_pattern=2),
               dict(head_dim=22, sliding_window=7, query_pre_attn_scalar=22, final_logit_softcapping=20.0),
               dict(head_dim=10, sliding_window=30, query_pre_attn_scalar=40, final_logit_softcapping=6.0,
                    layer_types=["full_attention", "sliding_attention"])],
    "Gemma4": [dict(head_dim=10, global_head_dim=14, vocab_size_per_layer_input=101, hidden_size_per_layer_input=20, num_kv_shared_layers=1,
                    layer_types=["full_attention", "full_attention"]),
               dict(head_dim=14, global_head_dim=22, vocab_size_per_layer_input=300, hidden_size_per_layer_input=14, sliding_window=4,
                    num_kv_shared_layers=1, use_double_wide_mlp=True, layer_types=["sliding_attention", "full_attention", "full_attention"]),
               dict(head_dim=12, global_head_dim=16, hidden_size_per_layer_input=0, sliding_window=5, attention_k_eq_v=True,
                    num_global_key_value_heads=3, attention_bias=True, final_logit_softcapping=9.0, enable_moe_block=True, num_experts=5,
                    top_k_experts=2, moe_intermediate_size=26, layer_types=["sliding_attention", "full_attention"])],
    "Glm4": [dict(head_dim=12), dict(head_dim=20, attention_bias=False), dict(head_dim=16, rms_norm_eps=1e-5)],
    "Ernie4_5": [dict(head_dim=14, use_bias=True), dict(head_dim=22), dict(head_dim=12, rope_parameters=ROPE(1e4))],
    "Granite": [dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.3, logits_scaling=8.0),
                dict(attention_multiplier=0.25, logits_scaling=1.7), dict(residual_multiplier=1.5, attention_multiplier=0.3)],
    "Lfm2": [dict(conv_L_cache=3, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"]),
             dict(conv_L_cache=4, block_multiple_of=6, conv_bias=True, layer_types=["full_attention", "conv", "conv"]),
             dict(conv_L_cache=2, block_multiple_of=16, block_ffn_dim_multiplier=1.25, layer_types=["conv", "conv"])],
    "Lfm2Moe": [dict(num_dense_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=26,
                     layer_types=["conv", "full_attention"]),
                dict(num_dense_layers=0, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=34, norm_topk_prob=False,
                     layer_types=["full_attention", "conv", "conv"], conv_bias=True, routed_scaling_factor=1.3),
                dict(num_dense_layers=1, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=22, use_expert_bias=False,
                     layer_types=["conv", "full_attention"], tie_embedding=False)],
    "Mamba": [dict(state_size=8), dict(state_size=3, conv_kernel=3, time_step_rank=5, use_bias=True, use_conv_bias=False),
              dict(state_size=16, conv_kernel=2, expand=3, tie_word_embeddings=True)],
    "FalconMamba": [dict(state_size=8, mixer_rms_eps=1e-4),
                    dict(state_size=5, conv_kernel=3, expand=16, time_step_rank=9, use_bias=True),
                    dict(state_size=16, conv_kernel=2, use_conv_bias=False, mixer_rms_eps=1e-3, tie_word_embeddings=True)],
    "Jamba": [dict(attn_layer_period=2, attn_layer_offset=0, num_experts=4, mamba_d_state=8),
              dict(attn_layer_period=3, attn_layer_offset=2, expert_layer_period=3, expert_layer_offset=0, num_experts=5,
                   num_experts_per_tok=3, mamba_d_state=5, mamba_d_conv=3, mamba_dt_rank=7, mamba_proj_bias=True),
              dict(attn_layer_period=4, attn_layer_offset=3, num_experts=1, mamba_d_state=16, mamba_d_conv=2, mamba_expand=1,
                   mamba_conv_bias=False)],
    "Mamba2": [dict(ALONE, num_heads=5, head_dim=20, state_size=8, n_groups=1),
               dict(ALONE, num_heads=12, head_dim=11, state_size=20, n_groups=4, use_bias=True, use_conv_bias=False, conv_kernel=3),
               dict(ALONE, num_heads=6, head_dim=24, state_size=16, n_groups=2, time_step_limit=(0.2, 0.9), chunk_size=4)],
    "Bamba": [dict(SCAN, mamba_n_heads=5, mamba_n_groups=1, attn_layer_indices=[0],
                   rope_parameters=dict(ROPE(1e4), partial_rotary_factor=0.4)),
              dict(SCAN, mamba_n_heads=6, mamba_n_groups=3, mamba_proj_bias=True, attention_bias=True, mlp_bias=True,
                   attn_layer_indices=[1], rope_parameters=dict(ROPE(1e5), partial_rotary_factor=0.4)),
              dict(SCAN, mamba_n_heads=6, mamba_n_groups=2, mamba_conv_bias=False, mamba_d_conv=2, time_step_limit=(0.3, 1.0))],
    "GraniteMoeHybrid": [dict(SCAN, mamba_n_heads=5, num_local_experts=5, num_experts_per_tok=3, intermediate_size=26,
                              position_embedding_type="rope", shared_intermediate_size=40,
                              layer_types=["full_attention", "linear_attention"], attention_multiplier=0.3),
                         dict(SCAN, mamba_n_heads=6, num_local_experts=0, shared_intermediate_size=72, embedding_multiplier=12.0,
                              residual_multiplier=0.22, logits_scaling=8.0, mamba_n_groups=2, tie_word_embeddings=True),
                         dict(SCAN, mamba_n_heads=6, num_local_experts=4, num_experts_per_tok=2, intermediate_size=30,
                              shared_intermediate_size=40, attention_bias=True, position_embedding_type="nope",
                              layer_types=["linear_attention", "full_attention"], mamba_proj_bias=True)],
    "NemotronH": [dict(NEMOTRON, n_groups=1, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=26, norm_topk_prob=False,
                       moe_shared_expert_intermediate_size=36, time_step_min=0.2,
                       layers_block_type=["moe", "linear_attention", "full_attention"]),
                  dict(NEMOTRON, n_groups=3, use_bias=True, mlp_bias=True, layers_block_type=["mlp", "linear_attention", "full_attention"]),
                  dict(NEMOTRON, n_groups=2, use_conv_bias=False, conv_kernel=2, time_step_min=0.5, mlp_hidden_act="gelu",
                       n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=30, moe_latent_size=20, n_group=2, topk_group=1,
                       moe_shared_expert_intermediate_size=44, routed_scaling_factor=1.5,
                       layers_block_type=["full_attention", "moe", "linear_attention", "mlp"])],
    "FalconH1": [dict(SCAN, mamba_d_ssm=60, mamba_n_heads=5, mamba_rms_norm=True, attention_in_multiplier=0.7,
                      ssm_multipliers=[0.5, 1.5, 0.8, 1.3, 0.6]),
                 dict(SCAN, mamba_d_ssm=None, mamba_n_heads=6, mamba_n_groups=3, mamba_rms_norm=True, mamba_norm_before_gate=False,
                      mamba_proj_bias=True, projectors_bias=True, attention_bias=True, mlp_bias=True, attention_out_multiplier=0.6,
                      mlp_multipliers=[0.8, 0.5], ssm_out_multiplier=0.4),
                 dict(SCAN, mamba_d_ssm=48, mamba_n_heads=6, mamba_n_groups=2, head_dim=14, time_step_limit=(0.3, 1.0),
                      ssm_in_multiplier=1.25, key_multiplier=0.4, embedding_multiplier=5.7, lm_head_multiplier=0.3)],
    "Zamba2": [dict(ZAMBA, num_hidden_layers=4, n_mamba_heads=5, layers_block_type=["hybrid", "linear_attention", "hybrid", "hybrid"],
                    time_step_min=0.2),
               dict(ZAMBA, num_hidden_layers=5, n_mamba_heads=6, mamba_ngroups=3, add_bias_linear=True, hidden_act="gelu_pytorch_tanh",
                    num_mem_blocks=3, use_shared_attention_adapter=True, layers_block_type=["linear_attention"] + ["hybrid"] * 4),
               dict(ZAMBA | dict(adapter_rank=9), num_hidden_layers=4, n_mamba_heads=8, mamba_ngroups=2, mamba_d_conv=2, num_key_value_heads=6,
                    num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True, time_step_min=0.4,
                    layers_block_type=["hybrid"] * 4, rope_parameters=dict(checkpoints.YARN, factor=2.0))],
    "Qwen3Next": [dict(DELTA, **EXPERTS, shared_expert_intermediate_size=30, head_dim=16, linear_num_key_heads=1,
                       linear_num_value_heads=3, linear_key_head_dim=9, linear_value_head_dim=11),
                  dict(DELTA, **EXPERTS, shared_expert_intermediate_size=22, head_dim=24, linear_num_key_heads=2,
                       linear_num_value_heads=4, linear_key_head_dim=14, linear_value_head_dim=10, linear_conv_kernel_dim=3,
                       norm_topk_prob=False, attention_bias=True, layer_types=["full_attention", "linear_attention", "linear_attention"]),
                  dict(DELTA, **dict(EXPERTS, mlp_only_layers=[1]), shared_expert_intermediate_size=46, head_dim=12, linear_num_key_heads=3,
                       linear_num_value_heads=3, linear_key_head_dim=10, linear_value_head_dim=12,
                       rope_parameters=dict(ROPE(1e6), partial_rotary_factor=0.5))],
    "Qwen3_5": [dict(DELTA, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=9, linear_value_head_dim=11),
                dict(DELTA, head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=14,
                     linear_value_head_dim=10, linear_conv_kernel_dim=3, attention_bias=True,
                     layer_types=["full_attention", "linear_attention", "linear_attention"]),
                dict(DELTA, head_dim=12, linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=10,
                     linear_value_head_dim=12, rope_parameters=dict(ROPE(1e6), partial_rotary_factor=0.5))],
    "Qwen3_5Moe": [dict(DELTA, **EXPERTS, shared_expert_intermediate_size=30, head_dim=16, linear_num_key_heads=1,
                        linear_num_value_heads=3, linear_key_head_dim=9, linear_value_head_dim=11),
                   dict(DELTA, **EXPERTS, shared_expert_intermediate_size=22, head_dim=24, linear_num_key_heads=2,
                        linear_num_value_heads=4, linear_key_head_dim=14, linear_value_head_dim=10, linear_conv_kernel_dim=3,
                        layer_types=["full_attention", "linear_attention", "linear_attention"]),
                   dict(DELTA, **EXPERTS, shared_expert_intermediate_size=46, head_dim=12, linear_num_key_heads=3,
                        linear_num_value_heads=3, linear_key_head_dim=10, linear_value_head_dim=12,
                        rope_parameters=dict(ROPE(1e6), partial_rotary_factor=0.5))],
    "OlmoHybrid": [dict(DELTA, linear_num_key_heads=5, linear_num_value_heads=5, linear_key_head_dim=7, linear_value_head_dim=14,
                        rope_parameters=dict(rope_type="default", rope_theta=None)),
                   dict(DELTA, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=12, linear_value_head_dim=9,
                        linear_allow_neg_eigval=False, linear_conv_kernel_dim=3, attention_bias=True, rope_parameters=ROPE(1e4),
                        layer_types=["full_attention", "linear_attention", "linear_attention"]),
                   dict(DELTA, linear_num_key_heads=3, linear_num_value_heads=3, linear_conv_kernel_dim=2, rms_norm_eps=1e-4,
                        rope_parameters=ROPE(5e5))],
    "KimiLinear": [dict(KIMI, num_key_value_heads=5, num_local_experts=4, n_shared_experts=1, linear_num_heads=3, linear_head_dim=11,
                        layer_types=["linear_attention", "full_attention"]),
                   dict(KIMI, num_key_value_heads=3, q_lora_rank=20, num_local_experts=6, n_shared_experts=2, n_group=2, topk_group=1,
                        linear_num_heads=2, linear_head_dim=16, linear_conv_kernel_dim=3, attention_bias=True, norm_topk_prob=False,
                        layer_types=["full_attention", "linear_attention", "linear_attention"])],
    "Arcee": [dict(mlp_bias=True), dict(head_dim=14, attention_bias=True), dict(rope_parameters=dict(checkpoints.YARN, factor=2.0))],
    "Starcoder2": [dict(sliding_window=4), dict(use_bias=False), dict(norm_epsilon=1e-3, hidden_act="gelu")],
    "GPT2": [dict(n_inner=70), dict(scale_attn_weights=False, activation_function="gelu"),
             dict(scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=True)],
    "GPTNeoX": [dict(rope_parameters=dict(ROPE(1e4), partial_rotary_factor=0.4)),
                dict(use_parallel_residual=False, hidden_act="gelu_fast", rope_parameters=dict(ROPE(1e5), partial_rotary_factor=1.0)),
                dict(attention_bias=False, rope_parameters=dict(ROPE(1e4), partial_rotary_factor=0.5))],
    "Cohere2": [dict(sliding_window=4, sliding_window_pattern=2, logit_scale=0.25),
                dict(sliding_window=5, attention_bias=True, logit_scale=1.0,
                     layer_types=["full_attention", "sliding_attention", "full_attention"]),
                dict(sliding_window=7, layer_types=["sliding_attention"] * 2, logit_scale=3.0, tie_word_embeddings=True)],
    "Nemotron": [dict(head_dim=12, partial_rotary_factor=0.5), dict(mlp_bias=True, attention_bias=True, partial_rotary_factor=1.0),
                 dict(hidden_act="gelu", partial_rotary_factor=0.5)],
    "Rwkv7": [dict(hidden_size=50, head_dim=10, ranks=(6, 5, 3, 9)), dict(head_dim=22, ranks=(16, 16, 16, 32)),
              dict(head_dim=72, intermediate_size=96, ranks=(8, 8, 4, 7))],
    "Phi3": [dict(rope_parameters=ROPE(1e4)), dict(sliding_window=6, rope_parameters=ROPE(1e5)),
             dict(rope_parameters=dict(checkpoints.LONG))],
    # With one expert a token its weight is 1 whatever the router says, which then has no gradient to compare.
    "Mixtral": [dict(num_local_experts=3, num_experts_per_tok=2, sliding_window=None),
                dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
                dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=None)],
    "Qwen3Moe": [dict(EXPERTS, head_dim=10, norm_topk_prob=False), dict(EXPERTS, head_dim=22, norm_topk_prob=True),
                 dict(EXPERTS, head_dim=12, norm_topk_prob=True, mlp_only_layers=[1], num_experts=4)],
    "Qwen2Moe": [dict(EXPERTS, shared_expert_intermediate_size=30), dict(EXPERTS, shared_expert_intermediate_size=22,
                                                                           norm_topk_prob=True, qkv_bias=False),
                 dict(EXPERTS, shared_expert_intermediate_size=46, mlp_only_layers=[1], num_experts=4, use_sliding_window=True,
                      sliding_window=4)],
    "Apertus": [dict(), dict(attention_bias=True, rms_norm_eps=1e-4, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
                dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0,
                                          high_freq_factor=4.0, original_max_position_embeddings=8))],
    "Ministral3": [dict(head_dim=14, rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, mscale=1.0,
                                                          mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
                                                          original_max_position_embeddings=4)),
                   dict(head_dim=22, sliding_window=5, rope_parameters=dict(
                       rope_type="default", rope_theta=1e4, llama_4_scaling_beta=0.5, original_max_position_embeddings=3)),
                   dict(head_dim=12, rope_parameters=dict(
                       rope_type="yarn", rope_theta=1e5, factor=2.0, beta_fast=16.0, llama_4_scaling_beta=0.3,
                       original_max_position_embeddings=8))],
    "GraniteMoe": [dict(num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.3, residual_multiplier=0.4),
                   dict(num_local_experts=5, num_experts_per_tok=3, embedding_multiplier=3.0, attention_multiplier=0.25,
                        logits_scaling=2.0),
                   dict(num_local_experts=6, num_experts_per_tok=2, attention_bias=True, attention_multiplier=0.3)],
    "HunYuanDenseV1": [dict(head_dim=14), dict(head_dim=22, attention_bias=True, rope_parameters=dict(
        rope_type="dynamic", rope_theta=10000.0, factor=1.0, alpha=1000.0)), dict(head_dim=12, rms_norm_eps=1e-4)],
    "HunYuanMoEV1": [dict(head_dim=14, num_experts=4, moe_topk=2), dict(head_dim=22, num_experts=5, moe_topk=2, attention_bias=True),
                     dict(head_dim=12, num_experts=6, moe_topk=3, rope_parameters=dict(
                         rope_type="dynamic", rope_theta=10000.0, factor=1.0, alpha=20.0))],
    "Glm4Moe": [dict(SIGMOID, head_dim=12, use_qk_norm=True), dict(SIGMOID, head_dim=20, n_group=2, topk_group=1),
                dict(SIGMOID, head_dim=16, use_qk_norm=True, n_shared_experts=2, norm_topk_prob=False, rope_parameters=dict(
                    rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25))],
    "MiniMaxM2": [dict(head_dim=12, num_local_experts=4, num_experts_per_tok=2, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
                  dict(head_dim=20, num_local_experts=5, num_experts_per_tok=2, rotary_dim=12),
                  dict(head_dim=16, num_local_experts=6, num_experts_per_tok=3)],
    "GptOss": [dict(head_dim=12, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, swiglu_limit=1.5, rope_parameters=dict(
        rope_type="yarn", rope_theta=150000.0, factor=32.0, truncate=False, original_max_position_embeddings=16)),
               dict(head_dim=20, num_local_experts=5, num_experts_per_tok=2, sliding_window=7, swiglu_alpha=1.0, attention_bias=False,
                    rope_parameters=dict(rope_type="default", rope_theta=1e4)),
               dict(head_dim=16, num_local_experts=6, num_experts_per_tok=3, layer_types=["full_attention"] * 2, swiglu_limit=3.0,
                    rope_parameters=dict(checkpoints.YARN))],
    "Llama4": [dict(head_dim=10, intermediate_size=26, intermediate_size_mlp=60, num_local_experts=4, moe_layers=[1], no_rope_layers=[1, 0],
                    attention_chunk_size=4, floor_scale=3),
               dict(head_dim=22, intermediate_size=34, intermediate_size_mlp=50, num_local_experts=5, num_experts_per_tok=2,
                    interleave_moe_layer_step=2, no_rope_layer_interval=3, attention_chunk_size=7, use_qk_norm=False, attention_bias=True),
               dict(head_dim=12, intermediate_size=22, num_local_experts=3, num_experts_per_tok=3, no_rope_layers=[0, 1],
                    layer_types=["chunked_attention", "full_attention"], attention_chunk_size=3, attn_temperature_tuning=False,
                    rope_parameters=dict(checkpoints.LLAMA3))],
    "Phimoe": [dict(intermediate_size=26, num_local_experts=4, attention_bias=True),
               dict(intermediate_size=34, num_local_experts=5, router_jitter_noise=0.2, lm_head_bias=True, sliding_window=6),
               dict(intermediate_size=22, num_local_experts=6, router_jitter_noise=0.5, attention_bias=True, lm_head_bias=True,
                    rope_parameters=dict(checkpoints.LONG, original_max_position_embeddings=16, short_mscale=0.9, long_mscale=1.2))],
    "Ernie4_5_Moe": [dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=26, moe_num_shared_experts=0),
                     dict(moe_num_experts=5, moe_k=2, moe_intermediate_size=34, moe_num_shared_experts=2,
                          moe_layer_interval=2),
                     dict(moe_num_experts=6, moe_k=3, moe_intermediate_size=22, moe_num_shared_experts=1,
                          moe_layer_start_index=0, moe_layer_end_index=0)],
    "Dots1": [dict(SIGMOID, head_dim=14), dict(SIGMOID, head_dim=22, attention_bias=True, n_group=2, topk_group=1,
                                                norm_topk_prob=True, sliding_window=4, max_window_layers=2),
              dict(SIGMOID, head_dim=12, n_shared_experts=2)],
    "DeepseekV2": [dict(LATENT, num_key_value_heads=5, q_lora_rank=18, kv_lora_rank=22, qk_nope_head_dim=10,
                        qk_rope_head_dim=6, v_head_dim=14, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
                        topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0),
                   dict(LATENT, q_lora_rank=None, kv_lora_rank=30, qk_nope_head_dim=18, qk_rope_head_dim=10, v_head_dim=8,
                        n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=2, n_group=3, topk_group=2,
                        topk_method="group_limited_greedy", routed_scaling_factor=0.7),
                   dict(LATENT, num_key_value_heads=6, q_lora_rank=26, kv_lora_rank=16, qk_nope_head_dim=12,
                        qk_rope_head_dim=4, v_head_dim=12, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=3,
                        topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=2.0)],
    "DeepseekV32": [dict(LATENT, num_key_value_heads=5, q_lora_rank=18, kv_lora_rank=22, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14,
                         n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, routed_scaling_factor=1.0,
                         index_topk=4, index_n_heads=9, index_head_dim=10),
                    dict(LATENT, q_lora_rank=26, kv_lora_rank=30, qk_nope_head_dim=18, qk_rope_head_dim=10, v_head_dim=8, n_routed_experts=6,
                         n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, routed_scaling_factor=1.7, attention_bias=True,
                         index_topk=7, index_n_heads=12, index_head_dim=18),
                    dict(LATENT, num_key_value_heads=6, q_lora_rank=26, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=12,
                         n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=2, n_group=2, topk_group=2, norm_topk_prob=False,
                         routed_scaling_factor=2.5, index_topk=30, index_n_heads=8, index_head_dim=4)],
    "DeepseekV3": [dict(LATENT, num_key_value_heads=5, q_lora_rank=18, kv_lora_rank=22, qk_nope_head_dim=10,
                        qk_rope_head_dim=6, v_head_dim=14, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
                        n_group=1, topk_group=1, routed_scaling_factor=1.0),
                   dict(LATENT, q_lora_rank=None, kv_lora_rank=30, qk_nope_head_dim=18, qk_rope_head_dim=10, v_head_dim=8,
                        n_routed_experts=6, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
                        routed_scaling_factor=1.7),
                   dict(LATENT, num_key_value_heads=6, q_lora_rank=26, kv_lora_rank=16, qk_nope_head_dim=12,
                        qk_rope_head_dim=4, v_head_dim=12, n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=2,
                        n_group=2, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=False)],
}
# Sizes that a family does not have.
WITHOUT = {"Mamba": ["num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"],
           "FalconMamba": ["num_attention_heads", "num_key_value_heads", "max_position_embeddings"],
           "GPT2": ["num_key_value_heads", "intermediate_size"], "GPTNeoX": ["num_key_value_heads"],
           "NemotronH": ["num_hidden_layers", "tie_word_embeddings"]}
# Ways to run; none moves a bit.
WAYS = [["--micro-batch", "2"], ["--micro-batch", "3"], ["--micro-batch", str(SEQUENCES)], ["--pad", "left:3"],
        ["--pad", "right:5", "--micro-batch", "3"], ["--pack", "--micro-batch", "3"],
        ["--pack", "--pad", "left:2", "--micro-batch", str(SEQUENCES)], ["--recompute"],
        ["--recompute", "--micro-batch", "3", "--pad", "left:1"], ["--threads", "1"], ["--threads", "3"], ["--budget", "400000"],
        ["--isa", "scalar"], ["--isa", "avx2"], ["--isa", "avx512"]]
RANKS = [["--groups", "8", "--ranks", ranks] for ranks in ["1", "2", "4", "8"]]
POLICY = ["--loss", "policy", "--temperature", "1"]
LOSSES = {"nll": [], "policy": POLICY, "policy_entropy": [*POLICY, "--entropy", str(gradients.ENTROPY)]}


def run(program, verb, model, tokens, out, *words):
    command = [program, verb, "--model", model, "--tokens", tokens, "--out", out, *words]
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {found.stderr}")
    return out


def routing(program, folder, tokens, dtype):
    """The experts that samebits chooses for each sequence, in ascending order, as gradients.routing has them."""
    with tempfile.TemporaryDirectory() as work:
        sequences, dump = Path(work) / "tokens.safetensors", Path(work) / "dump"
        save_file({"tokens": tokens.int().contiguous()}, sequences)
        run(program, "forward", folder, sequences, Path(work) / "logits.safetensors", "--dtype", dtype, "--dump", dump)
        layers = {}
        with open(dump, "rb") as file:
            file.readline()
            while line := file.readline():
                seen = json.loads(line)
                rows, width = len(seen["tokens"]), seen["width"]
                values = numpy.frombuffer(file.read(4 * rows * width), "<f4").reshape(rows, width)
                if seen["site"].endswith(".experts"):
                    layer = layers.setdefault(seen["site"], numpy.zeros((*tokens.shape, width), dtype=int))
                    for (sequence, position), row in zip(seen["tokens"], values, strict=True):
                        layer[sequence, position] = numpy.sort(row)
    return torch.from_numpy(numpy.stack(list(layers.values()), axis=1))


def draw(family, number, program, folder, models, wanted, generator):
    """Sequences whose experts are the same in all runs."""
    exact, low = models
    vocab = exact.config.vocab_size
    of_experts = gradients.routing(exact, torch.tensor([[1, 5, 6]])) is not None
    length = 11 if of_experts else 19
    kept, others, draws = [], 0, 0
    while len(kept) < wanted:
        sure, expected = [], []
        while len(sure) < min(SEQUENCES, wanted - len(kept)):
            draws += 1
            if draws > 125 * wanted:
                raise SystemExit(f"{family} {number}: too few sequences whose experts torch is sure of")
            tokens = torch.randint(3, vocab, (1, length), generator=generator)
            experts = gradients.routing(exact, tokens) if of_experts else None
            if experts is None or torch.equal(experts, gradients.routing(low, tokens)) and all(
                    torch.equal(experts, gradients.routing(exact, tokens, generator)) for _ in range(4)):
                sure.append(tokens)
                expected.append(experts)
        if of_experts:
            ours = [routing(program, folder, torch.cat(sure), dtype) for dtype in ["bf16", "fp32"]]
            same = [all(torch.equal(own[i], experts[..., :own.shape[-1]]) for own in ours) for i, experts in enumerate(expected)]
        else:
            same = [True] * len(sure)
        kept += [tokens for tokens, same in zip(sure, same) if same]
        others += same.count(False)
        if others > OTHERS * wanted:
            raise SystemExit(f"{family} {number}: samebits chooses other experts than torch for {others} of "
                             f"{others + len(kept)} sequences; too many for chance")
    if of_experts:
        print(f"{family:10} {number} other experts by samebits: {others} of {others + len(kept)} sequences, left out", flush=True)
    return torch.cat(kept)


def make(family, number, program, folder, batches):
    """A model in a folder, and its batches."""
    generator = torch.Generator().manual_seed(977 * number + len(family))
    torch.manual_seed(number)
    sizes = COMMON | SIZES[number] | SHAPES[family][number]
    sizes = {key: value for key, value in sizes.items() if key not in WITHOUT.get(family, [])}
    if family == "Rwkv7":
        rwkv7.make(folder, sizes, generator)
        return batches_of(family, number, program, folder, rwkv7.Model, batches, generator)
    model = getattr(transformers, checkpoints.CLASSES.get(family, f"{family}ForCausalLM"))(getattr(transformers, checkpoints.CONFIGS.get(family, f"{family}Config"))(**sizes))
    checkpoints.weights(model, generator)
    checkpoints.save(model.to(torch.bfloat16), folder)
    # Grouped products of experts ask for other sizes.
    load = lambda folder, dtype: transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager").eval()
    return batches_of(family, number, program, folder, load, batches, generator)


def batches_of(family, number, program, folder, load, batches, generator):
    """The model of a folder in fp32 and in bf16, and its batches."""
    exact, low = load(folder, torch.float32), load(folder, torch.bfloat16)
    tokens = draw(family, number, program, folder, (exact, low), batches * SEQUENCES, generator)
    data = gradients.with_loss(exact, tokens, generator)
    # A token does not count whose ratio is clipped in one run and not in another: a choice, as that of experts.
    save_file(data, folder / "data.safetensors")
    found = load_file(run(program, "grad", folder, folder / "data.safetensors", folder / "ours.safetensors"))["logprob"]
    with torch.no_grad():
        truth, of_torch = (gradients.logprobs(model, tokens)[0] for model in (exact, low))
    differs = [(clipped(data, logprob) != clipped(data, truth)) & (data["mask"] == 1) for logprob in (found, of_torch)]
    print(f"{family:10} {number} clipped otherwise, left out: {int(differs[0].sum())} tokens by samebits, "
          f"{int(differs[1].sum())} by torch, of {int(data['mask'].sum())}", flush=True)
    if differs[0].sum() > OTHERS * data["mask"].sum():
        raise SystemExit(f"{family} {number}: too many for chance")
    data["mask"] = torch.where(differs[0] | differs[1], 0, data["mask"]).int()
    return exact, low, data


def clipped(data, logprob):
    ratio, advantages = (logprob - data["old_logprob"]).exp(), data["advantages"][:, None]
    return ratio * advantages > ratio.clamp(0.8, 1.2) * advantages


def held_out(family, number, batches, program, work):
    folder = work / f"{family}-{number}"
    exact, low, data = make(family, number, program, folder, batches)
    good = True
    for loss, words in LOSSES.items():
        batches_of_it, ways = {}, 0
        for first in range(0, batches * SEQUENCES, SEQUENCES):
            batch = {key: value[first:first + SEQUENCES].contiguous() for key, value in data.items()}
            tokens = work / "tokens.safetensors"
            save_file(batch, tokens)
            truth, of_torch = (gradients.split(model, folder, gradients.run(model, batch, loss)[3]) for model in (exact, low))
            ours, wide = (load_file(run(program, "grad", folder, tokens, work / f"{dtype}.safetensors", "--dtype", dtype, *words))
                          for dtype in ("bf16", "fp32"))
            for name, gradient in truth.items():
                row = [(x - gradient).norm() ** 2 for x in (ours[name], of_torch[name], wide[name])] + [gradient.norm() ** 2]
                batches_of_it.setdefault(name, []).append(torch.stack(row))
            if first == 0:
                for base, others in [([], WAYS), (RANKS[0], RANKS[1:])]:
                    plain = digest(run(program, "grad", folder, tokens, work / "plain.safetensors", *words, *base))
                    for way in others:
                        same = digest(run(program, "grad", folder, tokens, work / "way.safetensors", *words, *way)) == plain
                        ways += same
                        good &= same
                        if not same:
                            print(f"{family} {number} {loss}: {' '.join(way)} has other bits", flush=True)
        squares = {name: torch.stack(rows).sum(0) for name, rows in batches_of_it.items()}
        # That of a bias of keys is 0 where they are not rotated: what is left is rounding.
        largest = max(row[3] for row in squares.values())
        nothing = [name for name, row in squares.items() if row[3] <= 1e-12 * largest]
        if nothing:
            print(f"{family:10} {number} gradients that are 0 but for rounding, left out: {', '.join(nothing)}", flush=True)
        squares = {name: row for name, row in squares.items() if name not in nothing}
        share = lambda a, b: 0.0 if a == 0 else float((a / b) ** 0.5)
        ratio, name = max((share(row[0], row[1]), name) for name, row in squares.items())
        error, widest = max((share(row[2], row[3]), name) for name, row in squares.items())
        of_name = torch.stack(batches_of_it[name])
        in_half = float((of_name[:, 0] / of_name[:, 1]).sqrt().median())
        good &= ratio <= 1 and error <= 1e-4
        print(f"{family:10} {number} {loss:14} bf16 {ratio:.3f} of torch's ({name}; {in_half:.2f} in half of its batches), fp32 {error:.1e} ({widest}), "
              f"{ways} of {len(WAYS) + len(RANKS) - 1} ways the same", flush=True)
    return good


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samebits", default="target/release/samebits")
    parser.add_argument("--work", type=Path, help="keeps the models there")
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("models", nargs="*", metavar="FAMILY[:NUMBER]", help="default: all of " + ", ".join(SHAPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as own:
        work = args.work or Path(own)
        work.mkdir(exist_ok=True, parents=True)
        models = [model.split(":") for model in args.models or SHAPES]
        runs = [(family, number) for family, *one in models for number in map(int, one or range(len(SIZES)))]
        good = [held_out(family, number, args.batches, args.samebits, work) for family, number in runs]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
