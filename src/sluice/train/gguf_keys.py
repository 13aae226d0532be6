"""A model's shape as the GGUF metadata that llama.cpp's converter writes; knows no tensors and no tokenizer."""

from __future__ import annotations

import gguf

from sluice.train.hf_config import HfConfig


def add_hyper_parameters(writer: gguf.GGUFWriter, c: HfConfig) -> None:
    """Add everything under the architecture's own name to `writer`."""
    writer.add_block_count(c.n_layers)
    writer.add_context_length(c.n_ctx)
    writer.add_embedding_length(c.n_embd)
    if c.n_ff:
        writer.add_feed_forward_length(c.n_ff)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_head_kv)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_expert_count(c.n_expert)
    writer.add_expert_used_count(c.top_k)
    _add_rope(writer, c)
    if c.model_type in ("mixtral", "olmoe"):
        writer.add_vocab_size(c.n_vocab)
    else:
        writer.add_expert_feed_forward_length(c.n_ff_expert)
    if c.n_ff_shared:
        writer.add_expert_shared_feed_forward_length(c.n_ff_shared)
    if c.linear is not None:
        writer.add_ssm_conv_kernel(c.linear.conv_width)
        writer.add_ssm_state_size(c.linear.head_dim)
        writer.add_ssm_group_count(c.linear.n_k_heads)
        writer.add_ssm_time_step_rank(c.linear.n_v_heads)
        writer.add_ssm_inner_size(c.linear.value_dim)
        writer.add_full_attention_interval(c.linear.interval)


def _add_rope(writer: gguf.GGUFWriter, c: HfConfig) -> None:
    rope = c.rope
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if "n_dims" in rope:
        writer.add_rope_dimension_count(rope["n_dims"])
        writer.add_rope_dimension_sections(rope["mrope_section"])
    elif c.architecture == "llama":
        writer.add_rope_dimension_count(c.head_dim)
    if rope["rope_type"] == "default":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
    writer.add_rope_scaling_factor(float(rope["factor"]))
    if rope["rope_type"] == "linear":
        return
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for key, add in (
        ("extrapolation_factor", writer.add_rope_scaling_yarn_ext_factor),
        ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
        ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
    ):
        if rope.get(key) is not None:
            add(float(rope[key]))
