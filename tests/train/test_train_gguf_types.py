"""Types of tensors by llama.cpp's rules. The expected ones were read off src/llama-quant.cpp, case by case."""

from __future__ import annotations

import pytest

from sluice.ggml import GgmlType, load_library
from sluice.train.gguf_types import FILE_TYPES, TypeRule

T = GgmlType
LONG, SHORT, ODD = (64, 256), (64, 64), (64, 40)  # rows of 256, of 32, of neither


def rule(type: str, n_layers: int = 8, n_expert: int = 32, n_gqa: int = 2, *, tied: bool = False) -> TypeRule:
    return TypeRule(FILE_TYPES[type], n_layers, n_expert, n_gqa, tied, load_library().ggml_blck_size)


def chosen(rule: TypeRule, part: str, shape: tuple[int, ...] = LONG) -> list[GgmlType]:
    """Of the tensor called so in each layer."""
    return [rule.chosen(f"blk.{i}.{part}.weight", shape)[0] for i in range(rule.n_layers)]


@pytest.mark.parametrize(("type", "plain"), [("q4_k", T.Q4_K), ("q5_k", T.Q5_K)])
def test_mixtures_give_some_layers_more_bits(type: str, plain: GgmlType) -> None:
    more = T.Q6_K  # first and last eighth, and each third between
    for n, layers in ((8, {0, 3, 6, 7}), (16, {0, 1, 4, 7, 10, 13, 14, 15}), (3, {2})):
        expected = [more if i in layers else plain for i in range(n)]
        for part in ("attn_v", "attn_qkv", "ffn_down_exps", "ffn_down_shexp"):
            assert chosen(rule(type, n), part) == expected, (n, part)
        for part in ("attn_q", "attn_k", "attn_output", "ffn_gate_exps", "ffn_up_exps", "ssm_out", "ssm_alpha"):
            assert chosen(rule(type, n), part) == [plain] * n, (n, part)


def test_low_bits_keep_values_and_outputs_higher() -> None:
    low, three = rule("q2_k", 2), rule("q3_k", 16)
    assert chosen(low, "attn_v") == [T.Q3_K] * 2 and chosen(rule("q2_k", 2, n_gqa=4), "attn_v") == [T.Q4_K] * 2
    assert chosen(low, "ffn_down_exps") == chosen(low, "attn_output") == [T.Q3_K] * 2
    assert chosen(three, "attn_v") == [T.Q5_K] * 2 + [T.Q4_K] * 14
    assert chosen(three, "ffn_down_exps") == [T.Q5_K] + [T.Q4_K] * 15
    assert chosen(three, "attn_output") == [T.Q4_K] * 16 and chosen(three, "ffn_up_exps") == [T.Q3_K] * 16
    assert chosen(rule("iq4_xs", 8, n_gqa=4), "attn_v") == [T.Q5_K] * 8
    assert chosen(rule("iq4_xs", 8), "ffn_down_exps") == [T.Q5_K] + [T.IQ4_XS] * 7


def test_eight_experts_have_a_rule_of_their_own() -> None:
    for type, outputs in (("q4_k", T.Q5_K), ("q5_k", T.Q5_K), ("q4_0", T.Q4_0), ("q6_k", T.Q6_K)):
        eight = rule(type, 2, n_expert=8)
        assert chosen(eight, "attn_k") == chosen(eight, "attn_v") == [T.Q8_0] * 2
        assert chosen(eight, "attn_output") == [outputs] * 2


def test_head_and_embeddings() -> None:
    for type, plain in (("q4_k", T.Q4_K), ("q4_0", T.Q4_0), ("q5_1", T.Q5_1), ("iq4_nl", T.IQ4_NL)):
        assert rule(type).chosen("output.weight", LONG)[0] == T.Q6_K
        assert rule(type).chosen("token_embd.weight", LONG)[0] == plain
        assert rule(type, tied=True).chosen("token_embd.weight", LONG)[0] == T.Q6_K
    for type in ("q8_0", "mxfp4"):
        assert rule(type).chosen("output.weight", LONG) == (T.Q8_0, T.Q8_0)
    assert rule("q4_k").chosen("output.weight", SHORT) == (T.Q8_0, T.Q8_0)  # it isn't even asked for six bits
    assert rule("q4_0").chosen("output.weight", SHORT) == (T.Q8_0, T.Q6_K)


def test_mxfp4_is_for_experts() -> None:
    assert chosen(rule("mxfp4", 1), "ffn_up_exps", (32, 16, 64)) == [T.MXFP4]
    assert chosen(rule("mxfp4", 1), "attn_q") == chosen(rule("mxfp4", 1), "ffn_up_shexp") == [T.Q8_0]


@pytest.mark.parametrize(
    ("type", "wanted", "became"),
    [("q4_k", T.Q4_K, T.Q5_0), ("q5_k", T.Q5_K, T.Q5_1), ("q6_k", T.Q6_K, T.Q8_0), ("q3_k", T.Q3_K, T.Q4_0),
     ("q2_k", T.Q2_K, T.Q4_0), ("iq4_xs", T.IQ4_XS, T.IQ4_NL), ("q4_0", T.Q4_0, T.Q4_0), ("q8_0", T.Q8_0, T.Q8_0)],
)  # fmt: skip
def test_rows_that_blocks_do_not_divide_fall_back(type: str, wanted: GgmlType, became: GgmlType) -> None:
    name = "blk.1.attn_q.weight"
    assert rule(type).chosen(name, LONG) == (wanted, wanted)
    assert rule(type).chosen(name, SHORT) == (became, wanted)
    assert rule(type).chosen(name, ODD) == (T.F16, wanted)


@pytest.mark.parametrize("type", FILE_TYPES)
@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_norm.weight", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.attn_q.bias",
     "blk.0.ssm_a", "blk.0.ssm_conv1d.weight", "blk.0.ffn_gate_inp_shexp.weight"],
)  # fmt: skip
def test_what_stays_f32(type: str, name: str) -> None:
    assert rule(type).chosen(name, (32, 256)) == (T.F32, T.F32)


def test_without_quantising_all_matrices_are_alike() -> None:
    for type in ("f32", "f16", "bf16"):
        for name in ("output.weight", "token_embd.weight", "blk.0.ffn_down_exps.weight"):
            assert rule(type).chosen(name, ODD)[0] == FILE_TYPES[type].base


def test_numbers_are_llama_cpps() -> None:
    import gguf

    for own, it in FILE_TYPES.items():
        name = gguf.LlamaFileType(it.number).name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
        assert name.removesuffix("_m").removesuffix("_moe") == own
