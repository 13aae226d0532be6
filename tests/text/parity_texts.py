"""Varied strings to compare tokenizers on: scripts, code, white space, digits, control characters, special tokens."""

from __future__ import annotations

import random
import unicodedata

_FIXED = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n\n", "\r\n", "\r\n\r\n", " \n", "\n ", "\t\n\t", " \r\n \r\n ",
    "a", " a", "a ", " a ", "  a  b   c    d", "Hello, world!", "Hello,\nworld!\n", "HELLO world Hello",
    "I'm you're he's we'll they'd I've don't", "I'M YOU'RE HE'S WE'LL THEY'D I'VE DON'T",
    "'s 't 're 've 'm 'll 'd '", "it's 'tis o'clock rock'n'roll l'été ’s", "x'ſ y'K z'İ", "a's'b'll'c", "''s'''ll",
    "don’t", "0 1 12 123 1234 12345 123456 1234567 12345678 1234567890",
    "3.14159 -2.5e-10 0x1F 1,000,000.00 50% $9.99 #1 1/2", "½ ² ① Ⅷ ٣٤٥ ४५६ ๕๖๗ 十二 1٢٣٤4",
    "a1b2c3 v1.2.3-rc4 ABC123def", "1a 22b 333c 4444d 55555e", "2026-11-29T14:41:00.123+01:00",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tdef g(self): pass\n",
    "if (a<=b && c!=d) { e->f(); g[h] = i++; } // j\n",
    "#include <stdio.h>\nint main(void) {\n\tprintf(\"%d\\n\", 1 << 3);\n\treturn 0;\n}\n",
    "SELECT * FROM `t` WHERE a='b';", "<html><body class=\"x\">&amp; &#39; </body></html>",
    "https://example.com/a?b=c&d=%20e#f", "me@example.org",
    "\\frac{\\partial f}{\\partial x} = \\sum_{i=0}^{n} x_i^2", "```python\nprint('x')\n```\n",
    "$$\\alpha$$ \\(x\\)", "{\"k\": [1, 2.0, null, true, \"v\\u00e9\\n\"]}", "a_b-c.d/e\\f|g~h`i^j@k#l",
    "!?!?... --- *** ___ === +++ ~~~", "(((([[[[{{{{<<<<>>>>}}}}]]]]))))", "¡Hola! ¿Qué tal? «Ça va» „Gut“",
    "你好，世界！今天天气不错。", "混合English和中文123测试", "こんにちは世界、カタカナとひらがなー。", "안녕하세요 세계! ㄱㄲㄴ", "각 나", "Привет, МИР! ёЁ ії",  # noqa: E501
    "Γειά σου Κόσμε",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645، \u0643\u064a\u0641\u061f \u064b\u064c\u064d",  # noqa: E501
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05d5\u05dc\u05dd", "नमस\u094dते दुनिया।",
    "புதிய తెలుగు ক\u09cdষ", "สวัสดีชาวโลก ທກ អនថ\u17d2ងៃ", "မြန\u103aမာ አማርኛ",
    "e\u0301 a\u0308o\u0308 n\u0303 Z\u0351\u036b\u0343\u036aA\u0301\u0302L҉G\u0334O",
    "\u0301x \u0301 \u0300\u0301\u0302", "ﬁ ﬀ ǅ ʰ ª º", "😀🚀👍🏽 👨\u200d👩\u200d👧\u200d👦 🇩🇪 ❤️ ⚡", "a😀b 😀😀😀",
    "𝓐𝓪 𝟘𝟙 𠀀𪛖 🅰", "\u200b\u200c\u200d\ufeff \xad\u2060 x\u200by", "\u202eabc\u202c \u2066d\u2069",
    "a\xa0b\u2003c\u3000d\u2028e\u2029f\x85g\u1680h\u202fi", "\xa0\xa0 \u2003\u2003\n\u3000\u3000x", "\x00",
    "a\x00b\x01\x02\x1b[31mred\x1b[0m\x7f", "\x0b\x0c\x1c\x1d\x1e\x1f x\x1cy", "\ufffd\ufffd x\ufffd",
    "\ue000\uf8ff \U000f0000", "\ufdd0\uffff", "\u0378\u0379 a\u0378b", "▁▁a▁ b", "Ġa Ċ",
    "<s> </s> <unk> <|endoftext|> <|im_start|>user\nHi<|im_end|>\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", "<s>a</s>  b<s> c",
    "<|im_end|><|im_end|>", " <|endoftext|> ", "<|endoftext|>\n\n x <|endoftext|>", "<<s>>", "<|im_<|im_end|>end|>",
    "[INST] x [/INST]", "<0x0A> <0xFF>", "<｜begin▁of▁sentence｜>User: hi", "<|user|>\n Hi <|end|> \n<|assistant|>  ",
    "<fim_prefix>a<fim_suffix>b<fim_middle>", "<|fim_pad|><|repo_name|>", "IMGIMGABZ <sentinel:12> IMGIMGABCDEZ",
    "www.x.com WWW iPhone McDonald aBcDeF XMLHttpRequest ÉCOLE étÉ ЖжЖ", "Thành phố Hồ Chí Minh", "İstanbul ışık",
]  # fmt: skip

_SCRIPTS = [
    (0x20, 0x7E), (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x24F), (0x300, 0x36F), (0x370, 0x3FF),
    (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF),
    (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x23FF), (0x2500, 0x27BF), (0x3000, 0x30FF), (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3), (0xFF00, 0xFFEF), (0x10400, 0x1044F), (0x1D400, 0x1D7FF), (0x1F300, 0x1F6FF),
    (0x20000, 0x2A6DF),
]  # fmt: skip
_WORDS = [
    "the", "of", "and", "Expert", "router", "token", "'s", "'LL", "don't", "12", "345", "6789", "0", "3.14", "(x)",
    "{y}", "[z]", "==", "!=", "->", "::", "//", "#", "@", "$", "%", "&", "*", "_", "__init__", "self.", "return",
    "import", "C++", "naïve", "café", "Straße", "ΑΒΓ", "мир", "世界", "日本語", "한국어", "สวัสดี", "नमस\u094dते",
    "\u0645\u0631\u062d\u0628\u0627", "\u05e9\u05dc\u05d5\u05dd", "😀", "👍🏽", "🇩🇪", "\u0301", "\u200d",
    "<|im_start|>", "<|im_end|>", "<s>", "</s>",
]  # fmt: skip
_GLUE = [
    "", "", " ", " ", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "\xa0", "\u3000", "'", "\x00",
    "        ",
]  # fmt: skip


def parity_texts(n: int = 600, seed: int = 0) -> list[str]:
    """`n` (at least 500) different strings, the same ones for the same seed.

    No characters new in Unicode 16, whose categories llama.cpp does not have yet: Python 3.11 knows Unicode 14, and a
    character without a category there is left out.
    """
    rng = random.Random(seed)
    texts = dict.fromkeys(_FIXED)
    for k in (2, 3, 7, 16, 31, 64, 200, 513, 1000):
        for c in (" ", "\n", "\t", "\r\n", "a", "-", "1", "\u3000", "'", "\u4e00", "\U0001f600"):
            texts[c * k] = None
            texts[f"x{c * k}y"] = None
    while len(texts) < n:
        if rng.random() < 0.5:
            parts = [rng.choice(_WORDS) + rng.choice(_GLUE) for _ in range(rng.randint(1, 30))]
        else:
            parts = []
            for _ in range(rng.randint(1, 8)):
                low, high = rng.choice(_SCRIPTS)
                parts += [chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6))]
                parts.append(rng.choice(_GLUE))
        text = "".join(c for c in "".join(parts) if c == "\x00" or c in "\n\r\t" or unicodedata.category(c) != "Cn")
        texts[text] = None
    return list(texts)
