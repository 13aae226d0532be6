"""llama.cpp's own tokenizer, through the C symbols that xllamacpp's library exports: the oracle for token ids."""

from __future__ import annotations

import ctypes as C
import importlib.util
from pathlib import Path
from types import TracebackType


class _ModelParams(C.Structure):
    """llama_model_params of llama.cpp b11549 (llama.h), with room behind it: it is passed by value."""

    _fields_ = (
        ("devices", C.c_void_p),
        ("tensor_buft_overrides", C.c_void_p),
        ("n_gpu_layers", C.c_int32),
        ("split_mode", C.c_int32),
        ("load_mode", C.c_int32),
        ("lazy_mode", C.c_int32),
        ("main_gpu", C.c_int32),
        ("tensor_split", C.c_void_p),
        ("progress_callback", C.c_void_p),
        ("progress_callback_user_data", C.c_void_p),
        ("kv_overrides", C.c_void_p),
        ("vocab_only", C.c_bool),
        ("others", C.c_bool * 127),
    )


_LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)


class LlamaCppVocab:
    """A file's vocabulary in llama.cpp; a context manager."""

    def __init__(self, path: Path) -> None:
        spec = importlib.util.find_spec("xllamacpp")
        assert spec is not None and spec.origin is not None
        (library,) = Path(spec.origin).parent.glob("xllamacpp*.so")
        self._lib = lib = C.CDLL(str(library))
        self._silence = _LOG(lambda level, text, data: None)
        lib.llama_log_set(self._silence, None)
        lib.llama_model_default_params.restype = _ModelParams
        lib.llama_model_load_from_file.restype = C.c_void_p
        lib.llama_model_load_from_file.argtypes = [C.c_char_p, _ModelParams]
        lib.llama_model_get_vocab.restype = C.c_void_p
        lib.llama_model_get_vocab.argtypes = [C.c_void_p]
        lib.llama_model_free.argtypes = [C.c_void_p]
        lib.llama_tokenize.argtypes = [
            C.c_void_p, C.c_char_p, C.c_int32, C.POINTER(C.c_int32), C.c_int32, C.c_bool, C.c_bool,
        ]  # fmt: skip
        lib.llama_token_to_piece.argtypes = [C.c_void_p, C.c_int32, C.c_char_p, C.c_int32, C.c_int32, C.c_bool]
        lib.llama_vocab_is_eog.argtypes = [C.c_void_p, C.c_int32]
        lib.llama_vocab_is_eog.restype = C.c_bool
        for name in ("llama_vocab_n_tokens", "llama_vocab_bos"):
            getattr(lib, name).argtypes = [C.c_void_p]
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {path}")
        self._vocab = lib.llama_model_get_vocab(self._model)

    def __enter__(self) -> LlamaCppVocab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lib.llama_model_free(self._model)
        self._lib.llama_log_set(None, None)

    @property
    def n_vocab(self) -> int:
        return self._lib.llama_vocab_n_tokens(self._vocab)

    @property
    def bos_id(self) -> int:
        return self._lib.llama_vocab_bos(self._vocab)

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        out = (C.c_int32 * room)()
        n = self._lib.llama_tokenize(self._vocab, data, len(data), out, room, bos, special)
        assert n >= 0
        return out[:n]

    def token_bytes(self, i: int) -> bytes:
        out = C.create_string_buffer(1024)
        n = self._lib.llama_token_to_piece(self._vocab, i, out, len(out), 0, True)
        assert n >= 0
        return out.raw[:n]

    def eos_ids(self) -> frozenset[int]:
        return frozenset(i for i in range(self.n_vocab) if self._lib.llama_vocab_is_eog(self._vocab, i))
