"""The pre-tokenizers that GGUF files name (`tokenizer.ggml.pre`): how text is cut before BPE. Knows no vocabulary.

Each entry gives what llama.cpp does for that name, because a file that runs there must see the same ids here; where
llama.cpp simplifies the original (gpt-4o and tekken treat every non-ASCII letter as both cases), so does this table.
Patterns are in Oniguruma's syntax, applied one after the other, each to the pieces the one before it left. One known
difference: characters new in Unicode 16 count as letters, digits, … here, and as unassigned in llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """What a pre-tokenizer's name stands for.

    `splits`: patterns whose matches become pieces of their own, and so do the gaps between them.
    `ignore_merges`: a piece that is itself a token is taken whole. `add_bos`: BOS unless the file says otherwise.
    `byte_level`: GPT-2's byte alphabet; if not, spaces become U+2581 and unknown characters become byte tokens.
    `newline_runs`: a run of newlines that is itself a token is taken whole.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True
    newline_runs: bool = False


_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&[^\\s]]+"
# The ranges that llama.cpp counts as Han: unified ideographs, extensions A to F, compatibility ideographs.
_HAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
_TEKKEN = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?:{_CONTRACTION})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?:{_CONTRACTION})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_MARKED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{_CONTRACTION})?"
_KIMI = rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_CONTRACTION})?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
# Digits in groups of three counted from the right; the text before a run of digits stays with its first group.
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_DIGIT_GROUPS = rf"(?>\P{{N}}+)(?:{_THREES})?|{_THREES}"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_JAIS2_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"
# Letters of the bicameral scripts, as DeepSeek-LLM's tokenizer lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_STARCODER = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN = PreTokenizer((_GPT2,))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer((_QWEN2,))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3))
_BAILING = PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",))
_AYA = PreTokenizer(
    (_DIGIT_GROUPS, rf"{_MARKED_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "a.x-4.0": _PLAIN,
    "afmoe": PreTokenizer(
        (
            _DIGIT_GROUPS,
            # U+8C48 is what U+F900, the original's, became in llama.cpp's source by Unicode normalisation.
            "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
            "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
            _DEEPSEEK3,
        )
    ),
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
    "bloom": PreTokenizer((_BLOOM,)),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "codeshell": _STARCODER,
    "cohere2moe": _AYA,
    "command-r": _STARCODER,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_KOREAN, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
            r"\s+\z",
            _CJK_KOREAN,
            r"\p{N}+",
        )
    ),
    "deepseek-r1-qwen": _QWEN,
    "deepseek-v3": _DEEPSEEK_V3,
    "exaone": _STARCODER,
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "exaone4": _PLAIN,
    "f2llmv2": _QWEN,
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "falcon-h1": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "gemma4": PreTokenizer((r"\n+",), add_bos=True, byte_level=False, newline_runs=True),
    "gigachat": _PLAIN,
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "gpt-2": _PLAIN,
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "gpt3-finnish": PreTokenizer((_BLOOM,)),
    "granite-docling": _PLAIN,
    "grok-2": _QWEN,
    "hunyuan": _QWEN,
    "hunyuan-dense": _DEEPSEEK_V3,
    "hy_v4": _DEEPSEEK_V3,
    "jais": _PLAIN,
    "jais-2": PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|{_JAIS2_SPACES}",)),
    "joyai-llm": _DEEPSEEK_V3,
    "kanana2": PreTokenizer((_GPT4O,)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "kormo": _QWEN,
    "laguna": PreTokenizer((r"\n+", _QWEN2)),
    "lfm2": _LLAMA_BPE,
    "llada-moe": _BAILING,
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama4": PreTokenizer((_GPT4O,)),
    "megrez": _QWEN,
    "mellum": _PLAIN,
    "mellum2": _STARCODER,
    "midm-2.0": _LLAMA_BPE,
    "minerva-7b": _STARCODER,
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"), ignore_merges=True
    ),
    "minimax-m2": PreTokenizer((_GPT4O,)),
    "mpt": _PLAIN,
    "olmo": _PLAIN,
    "phi-2": _PLAIN,
    "pixtral": _LLAMA_BPE,
    "poro-chat": PreTokenizer((_BLOOM,)),
    "qwen2": _QWEN,
    "qwen35": PreTokenizer((_QWEN35,)),
    "refact": _STARCODER,
    "sarvam-moe": PreTokenizer((r"\n+",), byte_level=False),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    ),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "smollm": _STARCODER,
    "solar-open": _QWEN,
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _HAN_KANA,
            rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "stablelm2": _QWEN,
    "starcoder": _STARCODER,
    "superbpe": PreTokenizer((r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))")),
    "talkie": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "tiny_aya": _AYA,
    "trillion": _PLAIN,
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}",)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "youtu": PreTokenizer(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
            f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_HAN_KANA}",
            rf"{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        ),
        ignore_merges=True,
    ),
}
