"""Other engines' answers to compare with: llama.cpp (through xllamacpp) and transformers. Knows nothing of Sluice.

Each engine runs in a process of its own, because two builds of ggml in one process would mix their symbols, and
because torch warns and starts threads. It stays for the next question, because importing takes ten seconds.

llama.cpp is called through the C API that xllamacpp's library exports. Its two parameter structs are read and written
as bytes at known offsets: those of build b11549, checked against the library's own defaults before they are used.
Its flash attention casts a float32 KV cache to float16 first (relative L2 of the logits against transformers: 2e-4 to
8e-2 on tiny float32 models, 1e-6 without), so a comparison in float32 leaves flash attention off, which is the default.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
FLASH = {"auto": -1, "off": 0, "on": 1}


# ---- what tests call -----------------------------------------------------------------------------------------------


def llamacpp_logits(
    path: Path, ids: Iterable[int], *, kv: str = "f32", flash: str = "off", threads: int = 1, chunk: int = 512
) -> np.ndarray:
    """llama.cpp's logits after every one of `ids`: [n_ids, n_vocab] float32. `chunk` is its micro-batch."""
    return _ask("llamacpp_logits", str(path), list(map(int, ids)), kv, flash, threads, chunk)


def llamacpp_together(
    path: Path, prompts: Sequence[tuple[Sequence[int], Sequence[int]]], *, kv: str = "f32", chunk: int = 512
) -> list[np.ndarray]:
    """llama.cpp's logits for several sequences in one context: of each, [n_ids + n_forced, n_vocab].

    A prompt is (ids, forced). The ids of all go in together; the forced tokens follow in steps of one for each
    sequence that has any left.
    """
    whole = [(list(map(int, ids)), list(map(int, forced))) for ids, forced in prompts]
    return _ask("llamacpp_together", str(path), whole, kv, chunk)


def llamacpp_each(paths: Sequence[Path], ids: Iterable[int], *, kv: str = "f32", chunk: int = 512) -> list[np.ndarray]:
    """`llamacpp_logits` of several files, in one process."""
    return _ask("llamacpp_each", [str(path) for path in paths], list(map(int, ids)), kv, chunk)


def llamacpp_adapted(path: Path, ids: Iterable[int], adapters: Sequence[tuple[Path, float]]) -> np.ndarray:
    """`llamacpp_logits` in float32 with LoRA adapters, GGUF files, each at its scale."""
    given = [(str(adapter), scale) for adapter, scale in adapters]
    return _ask("llamacpp_adapted", str(path), list(map(int, ids)), given)


def llamacpp_logprobs(
    path: Path, ids: Iterable[int], *, n_probs: int = 20, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The `n_probs` likeliest next tokens at every position: ids [n_ids, n_probs], log-probabilities of same shape."""
    return top_logprobs(llamacpp_logits(path, ids, **options), n_probs)


def llamacpp_greedy(
    path: Path, ids: Iterable[int], n: int, *, kv: str = "f32", flash: str = "off", threads: int = 1
) -> list[int]:
    """The `n` tokens that llama.cpp continues `ids` with, taking the likeliest each time; stops for nothing."""
    return _ask("llamacpp_greedy", str(path), list(map(int, ids)), n, kv, flash, threads)


def llamacpp_tokenize(
    path: Path, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True
) -> list[list[int]]:
    """llama.cpp's token ids of each text."""
    return _ask("llamacpp_tokenize", str(path), list(texts), add_special, parse_special)


def llamacpp_detokenize(path: Path, ids: Iterable[int]) -> str:
    """llama.cpp's text of `ids`, special tokens included; bytes that are not UTF-8 become U+FFFD."""
    return _ask("llamacpp_detokenize", str(path), list(map(int, ids)))


def transformers_logits(config: Any, weights: Mapping[str, np.ndarray], ids: Iterable[int]) -> np.ndarray:
    """transformers' float32 logits [n_ids, n_vocab] of a `tiny.TinyConfig` with float32 weights by their GGUF names."""
    return _ask("transformers_logits", vars(config), dict(weights), list(map(int, ids)))


def transformers_causal(
    model: str, config: Mapping[str, Any], state: Mapping[str, np.ndarray], ids: Iterable[int]
) -> np.ndarray:
    """transformers' float32 logits [n_ids, n_vocab] of its class `model`, such as "OlmoeForCausalLM".

    `config` are the arguments of the class's configuration; `state` has every weight by transformers' names, none left
    out and none too many. Attention and experts are the plain ("eager") ones.
    """
    return _ask("transformers_causal", model, dict(config), dict(state), list(map(int, ids)))


def transformers_adapted(
    model: str, config: Mapping[str, Any], state: Mapping[str, np.ndarray], ids: Iterable[int],
    adapters: Sequence[tuple[Path, float, Mapping[str, Any]]], *, std: float = 0.05,
) -> np.ndarray:  # fmt: skip
    """`transformers_causal` with random LoRA adapters, which PEFT makes and saves.

    Each is a directory to save it in, a scale, and the arguments of its configuration.
    """
    given = [(str(folder), scale, dict(options)) for folder, scale, options in adapters]
    return _ask("transformers_adapted", model, dict(config), dict(state), list(map(int, ids)), given, std)


def top_logprobs(logits: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities [rows, n] of the likeliest entries of each row, likeliest first."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    logprobs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :n]
    return ids, np.take_along_axis(logprobs, ids, axis=1)


class _Engine:
    """A process that answers questions until its stdin closes. What its libraries print goes to `said`."""

    def __init__(self) -> None:
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said
        )

    def ask(self, name: str, arguments: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            pickle.dump((name, arguments), self.process.stdin)
            self.process.stdin.flush()
            answer, error = pickle.load(self.process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self.process.wait()
            self.said.seek(0)
            text = self.said.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"oracle {name}: exit {code}: {text}") from None
        if error is not None:
            raise RuntimeError(f"oracle {name}: {error}")
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.said.close()


_engines: dict[str, _Engine] = {}


def _ask(name: str, *arguments: Any) -> Any:
    kind = name.partition("_")[0]
    engine = _engines.get(kind)
    if engine is None or engine.process.poll() is not None:
        engine = _engines[kind] = _Engine()
        atexit.register(engine.close)
    return engine.ask(name, arguments)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stdout
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = (ANSWERS[name](*arguments), None)
        except Exception:
            reply = (None, traceback.format_exc())
        pickle.dump(reply, answers)
        answers.flush()


# ---- llama.cpp, in the process of its own --------------------------------------------------------------------------


class _Params(ctypes.Structure):
    """A parameter struct passed by value. Larger than any build's, which both calling conventions tolerate."""

    _fields_ = (("raw", ctypes.c_ubyte * 256),)

    def get(self, kind: Any, offset: int) -> Any:
        return kind.from_buffer(self, offset).value

    def set(self, kind: Any, offset: int, value: Any) -> None:
        kind.from_buffer(self, offset).value = value


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


# field -> (type, offset in bytes, default that the library must report there)
_I32, _U32, _BOOL = ctypes.c_int32, ctypes.c_uint32, ctypes.c_bool
MODEL_FIELDS = {
    "n_gpu_layers": (_I32, 16, -1),
    "vocab_only": (_BOOL, 72, False),
    "use_extra_bufts": (_BOOL, 74, True),
}
CONTEXT_FIELDS = {
    "n_ctx": (_U32, 0, 512),
    "n_batch": (_U32, 4, 2048),
    "n_ubatch": (_U32, 8, 512),
    "n_seq_max": (_U32, 12, 1),
    "n_outputs_max": (_U32, 20, 0),
    "n_outputs_max_per_seq": (_U32, 24, 1),
    "n_threads": (_I32, 28, 4),
    "n_threads_batch": (_I32, 32, 4),
    "rope_scaling_type": (_I32, 40, -1),
    "flash_attn_type": (_I32, 52, -1),
    "yarn_ext_factor": (ctypes.c_float, 64, -1.0),
    "type_k": (_I32, 104, 1),
    "type_v": (_I32, 108, 1),
    "offload_kqv": (_BOOL, 137, True),
    "no_perf": (_BOOL, 138, True),
}


def _params(lib: ctypes.CDLL, function: str, fields: Mapping[str, tuple[Any, int, Any]], **values: Any) -> _Params:
    defaults = getattr(lib, function)
    defaults.restype = _Params
    params = defaults()
    for name, (kind, offset, expected) in fields.items():
        found = params.get(kind, offset)
        if found != expected:
            raise RuntimeError(f"{function}: {name} is {found}, not {expected}: another build than b11549?")
    for name, value in values.items():
        kind, offset, _ = fields[name]
        params.set(kind, offset, value)
    return params


class _LlamaCpp:
    """One loaded model; a context manager."""

    def __init__(self, path: str, *, vocab_only: bool = False) -> None:
        spec = importlib.util.find_spec("xllamacpp")
        if spec is None or spec.origin is None:
            raise RuntimeError("the oracle llama.cpp is missing: pip install xllamacpp==2026.10.11549")
        files = Path(spec.origin).parent.glob("xllamacpp*")
        self.lib = lib = ctypes.CDLL(str(next(f for f in files if f.suffix in (".so", ".pyd"))))
        pointer, i32 = ctypes.c_void_p, ctypes.c_int32
        for name, result, arguments in (
            ("llama_backend_init", None, ()),
            ("llama_model_load_from_file", pointer, (ctypes.c_char_p, _Params)),
            ("llama_init_from_model", pointer, (pointer, _Params)),
            ("llama_model_get_vocab", pointer, (pointer,)),
            ("llama_vocab_n_tokens", i32, (pointer,)),
            ("llama_batch_init", _Batch, (i32, i32, i32)),
            ("llama_batch_free", None, (_Batch,)),
            ("llama_free", None, (pointer,)),
            ("llama_model_free", None, (pointer,)),
            ("llama_adapter_lora_init", pointer, (pointer, ctypes.c_char_p)),
            ("llama_set_adapters_lora", i32, (pointer, pointer, ctypes.c_size_t, pointer)),
            ("llama_decode", i32, (pointer, _Batch)),
            ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), (pointer, i32)),
            ("llama_tokenize", i32, (pointer, ctypes.c_char_p, i32, pointer, i32, _BOOL, _BOOL)),
            ("llama_detokenize", i32, (pointer, pointer, i32, ctypes.c_char_p, i32, _BOOL, _BOOL)),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        lib.llama_backend_init()
        # Weights repacked at load compute other bits than the file's own layout does.
        params = _params(lib, "llama_model_default_params", MODEL_FIELDS, vocab_only=vocab_only, use_extra_bufts=False)
        self.model = lib.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.context: int | None = None
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self.vocab)

    def __enter__(self) -> _LlamaCpp:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.context:
            self.lib.llama_batch_free(self.batch)
            self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    def start(self, n_ctx: int, kv: str, flash: str, threads: int, chunk: int, n_seqs: int = 1) -> None:
        """Makes a context of `n_seqs` sequences of `n_ctx` positions, all empty."""
        n_ctx *= n_seqs
        self.n_past, self.n_batch = [0] * n_seqs, min(n_ctx, 2048)
        params = _params(
            self.lib,
            "llama_context_default_params",
            CONTEXT_FIELDS,
            n_ctx=n_ctx,
            n_batch=self.n_batch,
            n_ubatch=chunk,
            n_seq_max=n_seqs,
            n_outputs_max_per_seq=0,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn_type=FLASH[flash],
            type_k=GGML_TYPES[kv],
            type_v=GGML_TYPES[kv],
        )
        self.context = self.lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp does not make a context")
        self.batch = self.lib.llama_batch_init(self.n_batch, 0, 1)

    def adapt(self, adapters: Sequence[tuple[str, float]]) -> None:
        """Applies LoRA adapters from here on. The model frees them."""
        loaded = [self.lib.llama_adapter_lora_init(self.model, path.encode()) for path, _ in adapters]
        if not all(loaded):
            raise RuntimeError(f"llama.cpp does not load one of {adapters}")
        n = len(loaded)
        scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
        self.lib.llama_set_adapters_lora(self.context, (ctypes.c_void_p * n)(*loaded), n, scales)

    def step(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[np.ndarray]:
        """Appends ids to sequences, all in one batch: of each part (sequence, ids), the logits [n_ids, n_vocab]."""
        batch, n = self.batch, 0
        for sequence, ids in parts:
            for token in ids:
                if n == self.n_batch:
                    raise RuntimeError(f"a step takes {self.n_batch} tokens at most")
                batch.token[n], batch.pos[n] = token, self.n_past[sequence]
                batch.n_seq_id[n], batch.seq_id[n][0], batch.logits[n] = 1, sequence, 1
                self.n_past[sequence] += 1
                n += 1
        batch.n_tokens = n
        status = self.lib.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")
        logits = np.empty((n, self.n_vocab), np.float32)
        for i in range(n):
            logits[i] = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, i), (self.n_vocab,))
        return np.split(logits, np.cumsum([len(ids) for _, ids in parts])[:-1])

    def decode(self, ids: Sequence[int]) -> np.ndarray:
        """Appends `ids` to the first sequence and returns the logits after each: [n_ids, n_vocab]."""
        pieces = [ids[begin : begin + self.n_batch] for begin in range(0, len(ids), self.n_batch)]
        return np.concatenate([self.step([(0, piece)])[0] for piece in pieces])


def _answer_logits(path: str, ids: list[int], kv: str, flash: str, threads: int, chunk: int) -> np.ndarray:
    with _LlamaCpp(path) as llama:
        llama.start(len(ids), kv, flash, threads, chunk)
        return llama.decode(ids)


def _answer_adapted(path: str, ids: list[int], adapters: list[tuple[str, float]]) -> np.ndarray:
    with _LlamaCpp(path) as llama:
        llama.start(len(ids), "f32", "off", 1, 512)
        llama.adapt(adapters)
        return llama.decode(ids)


def _answer_each(paths: list[str], ids: list[int], kv: str, chunk: int) -> list[np.ndarray]:
    return [_answer_logits(path, ids, kv, "off", 1, chunk) for path in paths]


def _answer_together(path: str, prompts: list[tuple[list[int], list[int]]], kv: str, chunk: int) -> list[np.ndarray]:
    with _LlamaCpp(path) as llama:
        llama.start(max(len(ids) + len(forced) for ids, forced in prompts), kv, "off", 1, chunk, len(prompts))
        rows = [[logits] for logits in llama.step([(i, ids) for i, (ids, _) in enumerate(prompts)])]
        for at in range(max(len(forced) for _, forced in prompts)):
            parts = [(i, forced[at : at + 1]) for i, (_, forced) in enumerate(prompts) if at < len(forced)]
            for (i, _), logits in zip(parts, llama.step(parts), strict=True):
                rows[i].append(logits)
        return [np.concatenate(each) for each in rows]


def _answer_greedy(path: str, ids: list[int], n: int, kv: str, flash: str, threads: int) -> list[int]:
    with _LlamaCpp(path) as llama:
        llama.start(len(ids) + n, kv, flash, threads, 512)
        tokens: list[int] = []
        pending = ids
        for _ in range(n):
            tokens.append(int(llama.decode(pending)[-1].argmax()))
            pending = tokens[-1:]
        return tokens


def _answer_tokenize(path: str, texts: list[str], add_special: bool, parse_special: bool) -> list[list[int]]:
    with _LlamaCpp(path, vocab_only=True) as llama:
        answers = []
        for text in texts:
            raw = text.encode()
            room = len(raw) + 8
            ids = (ctypes.c_int32 * room)()
            n = llama.lib.llama_tokenize(llama.vocab, raw, len(raw), ids, room, add_special, parse_special)
            if n < 0:
                raise RuntimeError(f"llama_tokenize needs {-n} tokens for {len(raw)} bytes")
            answers.append(list(ids[:n]))
        return answers


def _answer_detokenize(path: str, ids: list[int]) -> str:
    with _LlamaCpp(path, vocab_only=True) as llama:
        room = 256 * (len(ids) + 1)
        text = ctypes.create_string_buffer(room)
        n = llama.lib.llama_detokenize(
            llama.vocab, (ctypes.c_int32 * len(ids))(*ids), len(ids), text, room, False, True
        )
        if n < 0:
            raise RuntimeError(f"llama_detokenize needs {-n} bytes for {len(ids)} tokens")
        return text.raw[:n].decode(errors="replace")


# ---- transformers, in the process of its own -----------------------------------------------------------------------


def _answer_transformers(config: dict[str, Any], weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

    torch.set_num_threads(1)
    qwen = config["arch"] == "qwen3moe"
    scaling = config["rope_scaling"] or {}
    rope: dict[str, Any] = {"rope_type": scaling.get("type", "default"), "rope_theta": config["rope_base"]}
    if scaling:
        rope["factor"] = float(scaling["factor"])
    if "original_context_length" in scaling:
        rope["original_max_position_embeddings"] = scaling["original_context_length"]
    shared = {
        "vocab_size": config["n_vocab"],
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_head"],
        "num_key_value_heads": config["n_head_kv"],
        "head_dim": config["head_dim"],
        "num_experts_per_tok": config["top_k"],
        "rms_norm_eps": config["rms_eps"],
        "rope_parameters": rope,
        "max_position_embeddings": config["n_ctx"],
        "tie_word_embeddings": config["tied"],
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "sliding_window": None,
    }
    dense = list(config["dense_layers"])
    if qwen:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **shared,
                intermediate_size=config["n_ff_dense"],
                moe_intermediate_size=config["n_ff_exp"],
                num_experts=config["n_expert"],
                norm_topk_prob=True,
                mlp_only_layers=dense,
            )
        )
    else:
        model = MixtralForCausalLM(
            MixtralConfig(**shared, intermediate_size=config["n_ff_exp"], num_local_experts=config["n_expert"])
        )
        for layer in dense:  # Mixtral itself has none; the block is the same arithmetic in every family
            plain = Qwen3MoeConfig(hidden_size=config["n_embd"], intermediate_size=config["n_ff_dense"])
            model.model.layers[layer].mlp = Qwen3MoeMLP(plain)

    def rotated(w: np.ndarray, n_head: int) -> np.ndarray:
        """Rows of a query or key projection in transformers' order (a head's halves are rotated against each other).

        The llama architecture's files interleave the halves instead: row 2 i + j of a head is half j's i-th.
        """
        if qwen:
            return w
        heads = w.reshape(n_head, config["head_dim"] // 2, 2, w.shape[-1])
        return heads.swapaxes(1, 2).reshape(w.shape)

    state: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
        "lm_head.weight": weights["token_embd.weight" if config["tied"] else "output.weight"],
    }
    for layer in range(config["n_layers"]):
        here, there = f"blk.{layer}.", f"model.layers.{layer}."
        names = {
            "attn_norm": "input_layernorm",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
        }
        if qwen:
            names |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
        if layer in dense:
            names |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
        else:
            names["ffn_gate_inp"] = "mlp.gate"
            if config["fused"]:
                gate_up = weights[here + "ffn_gate_up_exps.weight"]
            else:
                gate_up = np.concatenate([weights[f"{here}ffn_{part}_exps.weight"] for part in ("gate", "up")], axis=1)
            state[there + "mlp.experts.gate_up_proj"] = gate_up
            state[there + "mlp.experts.down_proj"] = weights[here + "ffn_down_exps.weight"]
        for mine, theirs in names.items():
            state[f"{there}{theirs}.weight"] = weights[f"{here}{mine}.weight"]
        for mine, theirs, n_head in (("attn_q", "q_proj", config["n_head"]), ("attn_k", "k_proj", config["n_head_kv"])):
            state[f"{there}self_attn.{theirs}.weight"] = rotated(weights[f"{here}{mine}.weight"], n_head)
    model.load_state_dict({name: torch.from_numpy(np.array(w, np.float32)) for name, w in state.items()}, strict=True)
    if "rope_freqs.weight" in weights:
        model.model.rotary_emb.inv_freq.div_(torch.from_numpy(weights["rope_freqs.weight"]))
    with torch.inference_mode():
        return model.eval()(torch.tensor([ids])).logits[0].float().numpy()


def _causal(name: str, config: dict[str, Any], state: dict[str, np.ndarray]) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    kind = getattr(transformers, name)
    settings = {"attn_implementation": "eager", "experts_implementation": "eager", **config}
    model = kind(kind.config_class(**settings))
    weights = {key: torch.from_numpy(np.array(w, np.float32)) for key, w in state.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    if unexpected or set(missing) - tied:
        raise RuntimeError(f"{name}: missing {sorted(set(missing) - tied)}, unknown {sorted(unexpected)}")
    return model.eval()


def _answer_causal(name: str, config: dict[str, Any], state: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    import torch

    model = _causal(name, config, state)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def _answer_adapted_causal(
    name: str, config: dict[str, Any], state: dict[str, np.ndarray], ids: list[int],
    adapters: list[tuple[str, float, dict[str, Any]]], std: float,
) -> np.ndarray:  # fmt: skip
    import warnings

    import peft
    import torch

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model: Any = _causal(name, config, state)
    model.config.model_type = "adapted"  # or PEFT moves dense matrices of these names to experts, and leaves them out
    for i, (_, _, options) in enumerate(adapters):
        settings = peft.LoraConfig(**options)
        if i == 0:
            model = peft.PeftModel(model, settings, adapter_name="0")
        else:
            model.add_adapter(str(i), settings)
    for key, values in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(values, std=std if "lora_B" in key else values.shape[-1] ** -0.5)
    for i, (folder, _, _) in enumerate(adapters):
        model.save_pretrained(folder, selected_adapters=[str(i)])
        for file in (Path(folder) / str(i)).iterdir():  # where it puts all but those called "default"
            file.rename(Path(folder) / file.name)
    names = [str(i) for i in range(len(adapters))]
    model.base_model.set_adapter(names)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for i, (_, scale, _) in enumerate(adapters):
                if str(i) in module.scaling:
                    module.scaling[str(i)] *= scale
    with torch.inference_mode():
        return model.eval()(torch.tensor([ids])).logits[0].float().numpy()


ANSWERS: dict[str, Callable[..., Any]] = {
    "llamacpp_logits": _answer_logits,
    "llamacpp_together": _answer_together,
    "llamacpp_adapted": _answer_adapted,
    "llamacpp_each": _answer_each,
    "llamacpp_greedy": _answer_greedy,
    "llamacpp_tokenize": _answer_tokenize,
    "llamacpp_detokenize": _answer_detokenize,
    "transformers_logits": _answer_transformers,
    "transformers_causal": _answer_causal,
    "transformers_adapted": _answer_adapted_causal,
}

if __name__ == "__main__":
    _serve()
