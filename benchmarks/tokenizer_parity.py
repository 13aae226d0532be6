"""Compares Sluice's token ids with llama.cpp's on every GGUF in a folder; prints a line per file, JSON last.

    python benchmarks/tokenizer_parity.py FOLDER [--texts 1000]

The folder `vendor/llama.cpp/models` of llama-cpp-python's source distribution holds 20 vocabulary-only files. For
each file and text four encodings are compared (special-token text recognised or not, BOS as the file says or not),
then the bytes of every token and the set of end-of-generation tokens. A file whose kind of tokenizer Sluice refuses
is reported as refused, with the reason. Needs: xllamacpp (Linux or macOS), gguf. Exit code 1 if any id differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from gguf import GGUFReader

from sluice.errors import ModelFileError
from sluice.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "text"))
from llamacpp_vocab import LlamaCppVocab  # pyright: ignore[reportMissingImports]
from parity_texts import parity_texts  # pyright: ignore[reportMissingImports]


def _same(ours: bytes, theirs: bytes) -> bool:
    """llama.cpp has `[UNK_BYTE_0x…]` for a token spelt outside GPT-2's byte alphabet; Sluice has the character."""
    return ours == theirs or theirs.startswith(b"[UNK_BYTE_0x")


def compare(path: Path, texts: list[str]) -> dict[str, object]:
    """What differs for one file: counts, and the first text that does."""
    meta = {key: field.contents() for key, field in GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
    start = time.perf_counter()
    try:
        ours = Tokenizer.from_metadata(meta)
    except ModelFileError as error:
        return {"refused": str(error)[:100]}
    build_s = time.perf_counter() - start
    differing: list[str] = []
    encode_s = peer_s = 0.0
    with LlamaCppVocab(path) as theirs:
        for text in texts:
            for special, bos in ((False, False), (True, False), (False, True), (True, True)):
                t0 = time.perf_counter()
                got = ours.encode(text, special=special, bos=None if bos else False)
                t1 = time.perf_counter()
                want = theirs.encode(text, special=special, bos=bos)
                encode_s, peer_s = encode_s + t1 - t0, peer_s + time.perf_counter() - t1
                if got != want:
                    differing.append(f"special={special} bos={bos} {text[:60]!r}: {got[:12]} != {want[:12]}")
        pieces = [i for i in range(theirs.n_vocab) if not _same(ours.token_bytes(i), theirs.token_bytes(i))]
        ends = sorted(ours.eos_ids ^ theirs.eos_ids())
    return {
        "pre": meta.get("tokenizer.ggml.pre"),
        "model": meta.get("tokenizer.ggml.model"),
        "n_vocab": ours.n_vocab,
        "encodings": 4 * len(texts),
        "differing": len(differing),
        "first": differing[0] if differing else None,
        "pieces_differing": len(pieces),
        "first_piece": pieces[0] if pieces else None,
        "eos_differing": ends,
        "build_s": round(build_s, 3),
        "encode_s": round(encode_s, 3),
        "llamacpp_encode_s": round(peer_s, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=1000)
    args = parser.parse_args()
    texts = parity_texts(args.texts)
    results: dict[str, dict[str, object]] = {}
    for path in sorted(args.folder.glob("*.gguf")):
        results[path.name] = result = compare(path, texts)
        print(f"{path.name:36}", *(f"{k}={v}" for k, v in result.items()), flush=True)
    faults = ("differing", "pieces_differing", "eos_differing")
    bad = [name for name, result in results.items() if any(result.get(fault) for fault in faults)]
    print(json.dumps({"texts": len(texts), "files": len(results), "differing_files": bad, "results": results}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
