"""Finds and loads ggml's shared libraries and declares the calls used; knows signatures, not what they compute."""

from __future__ import annotations

import ctypes as C
import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.errors import GgmlError

if TYPE_CHECKING:
    from sluice.ggml.device import Device

OLDEST, NEWEST_TRIED = (0, 20, 2), (0, 26, 0)

ptr, i64, size, i32, f32, text = C.c_void_p, C.c_int64, C.c_size_t, C.c_int, C.c_float, C.c_char_p


class InitParams(C.Structure):
    """`struct ggml_init_params`."""

    _fields_ = [("mem_size", size), ("mem_buffer", ptr), ("no_alloc", C.c_bool)]


class GgufInitParams(C.Structure):
    """`struct gguf_init_params`."""

    _fields_ = [("no_alloc", C.c_bool), ("ctx", ptr)]


class ThreadPoolParams(C.Structure):
    """`struct ggml_threadpool_params` of ggml 0.20 to 0.25 (GGML_MAX_N_THREADS is 512)."""

    _fields_ = [
        ("cpumask", C.c_bool * 512),
        ("n_threads", i32),
        ("prio", i32),
        ("poll", C.c_uint32),
        ("strict_cpu", C.c_bool),
        ("paused", C.c_bool),
    ]


_BASE: dict[str, tuple] = {
    "ggml_version": (text,),
    "ggml_commit": (text,),
    "ggml_init": (ptr, InitParams),
    "ggml_free": (None, ptr),
    "ggml_tensor_overhead": (size,),
    "ggml_graph_overhead_custom": (size, size, C.c_bool),
    "ggml_new_graph_custom": (ptr, ptr, size, C.c_bool),
    "ggml_build_forward_expand": (None, ptr, ptr),
    "ggml_graph_n_nodes": (i32, ptr),
    "ggml_get_data": (ptr, ptr),
    "ggml_nbytes": (size, ptr),
    "ggml_type_size": (size, i32),
    "ggml_blck_size": (i64, i32),
    "ggml_type_name": (text, i32),
    "ggml_set_input": (None, ptr),
    "ggml_set_output": (None, ptr),
    "ggml_quantize_chunk": (size, i32, ptr, ptr, i64, i64, i64, ptr),
    "ggml_quantize_requires_imatrix": (C.c_bool, i32),
    "ggml_new_tensor": (ptr, ptr, i32, i32, ptr),
    "ggml_view_4d": (ptr, ptr, ptr, i64, i64, i64, i64, size, size, size, size),
    "ggml_reshape_4d": (ptr, ptr, ptr, i64, i64, i64, i64),
    "ggml_permute": (ptr, ptr, ptr, i32, i32, i32, i32),
    "ggml_cont": (ptr, ptr, ptr),
    "ggml_cpy": (ptr, ptr, ptr, ptr),
    "ggml_cast": (ptr, ptr, ptr, i32),
    "ggml_repeat": (ptr, ptr, ptr, ptr),
    "ggml_get_rows": (ptr, ptr, ptr, ptr),
    "ggml_set_rows": (ptr, ptr, ptr, ptr, ptr),
    "ggml_add": (ptr, ptr, ptr, ptr),
    "ggml_mul": (ptr, ptr, ptr, ptr),
    "ggml_div": (ptr, ptr, ptr, ptr),
    "ggml_scale": (ptr, ptr, ptr, f32),
    "ggml_clamp": (ptr, ptr, ptr, f32, f32),
    "ggml_fill": (ptr, ptr, ptr, f32),
    "ggml_sum_rows": (ptr, ptr, ptr),
    "ggml_rms_norm": (ptr, ptr, ptr, f32),
    "ggml_l2_norm": (ptr, ptr, ptr, f32),
    "ggml_sigmoid": (ptr, ptr, ptr),
    "ggml_silu": (ptr, ptr, ptr),
    "ggml_tanh": (ptr, ptr, ptr),
    "ggml_gelu_erf": (ptr, ptr, ptr),
    "ggml_softplus": (ptr, ptr, ptr),
    "ggml_concat": (ptr, ptr, ptr, ptr, i32),
    "ggml_ssm_conv": (ptr, ptr, ptr, ptr),
    "ggml_gated_delta_net": (ptr, ptr, ptr, ptr, ptr, ptr, ptr, ptr, i64),
    "ggml_add_id": (ptr, ptr, ptr, ptr, ptr),
    "ggml_soft_max": (ptr, ptr, ptr),
    "ggml_soft_max_ext": (ptr, ptr, ptr, ptr, f32, f32),
    "ggml_soft_max_add_sinks": (None, ptr, ptr),
    "ggml_argsort_top_k": (ptr, ptr, ptr, i32),
    "ggml_mul_mat": (ptr, ptr, ptr, ptr),
    "ggml_mul_mat_id": (ptr, ptr, ptr, ptr, ptr),
    "ggml_swiglu_split": (ptr, ptr, ptr, ptr),
    "ggml_geglu_split": (ptr, ptr, ptr, ptr),
    "ggml_swiglu_oai": (ptr, ptr, ptr, ptr, f32, f32),
    "ggml_rope_ext": (ptr, ptr, ptr, ptr, ptr, i32, i32, i32, f32, f32, f32, f32, f32, f32),
    "ggml_flash_attn_ext": (ptr, ptr, ptr, ptr, ptr, ptr, f32, f32, f32),
    "ggml_flash_attn_ext_set_prec": (None, ptr, i32),
    "ggml_flash_attn_ext_add_sinks": (None, ptr, ptr),
    "ggml_gallocr_new": (ptr, ptr),
    "ggml_gallocr_free": (None, ptr),
    "ggml_gallocr_reserve": (C.c_bool, ptr, ptr),
    "ggml_gallocr_alloc_graph": (C.c_bool, ptr, ptr),
    "ggml_gallocr_get_buffer_size": (size, ptr, i32),
    "ggml_backend_get_default_buffer_type": (ptr, ptr),
    "ggml_backend_buffer_free": (None, ptr),
    "ggml_backend_tensor_alloc": (i32, ptr, ptr, ptr),
    "ggml_backend_graph_compute": (i32, ptr, ptr),
    "ggml_backend_free": (None, ptr),
    "gguf_init_from_file": (ptr, text, GgufInitParams),
    "gguf_free": (None, ptr),
    "gguf_get_alignment": (size, ptr),
    "gguf_get_data_offset": (size, ptr),
    "gguf_get_n_kv": (i64, ptr),
    "gguf_get_key": (text, ptr, i64),
    "gguf_get_kv_type": (i32, ptr, i64),
    "gguf_get_arr_type": (i32, ptr, i64),
    "gguf_get_arr_n": (size, ptr, i64),
    "gguf_get_arr_data": (ptr, ptr, i64),
    "gguf_get_arr_str": (text, ptr, i64, size),
    "gguf_get_val_str": (text, ptr, i64),
    "gguf_get_val_data": (ptr, ptr, i64),
    "gguf_get_n_tensors": (i64, ptr),
    "gguf_get_tensor_name": (text, ptr, i64),
    "gguf_get_tensor_ne": (C.POINTER(i64), ptr, i64),
    "gguf_get_tensor_type": (i32, ptr, i64),
    "gguf_get_tensor_offset": (size, ptr, i64),
    "gguf_get_tensor_size": (size, ptr, i64),
}
_CPU: dict[str, tuple] = {
    "ggml_backend_cpu_init": (ptr,),
    "ggml_backend_cpu_set_n_threads": (None, ptr, i32),
    "ggml_backend_cpu_set_threadpool": (None, ptr, ptr),
    "ggml_backend_cpu_buffer_from_ptr": (ptr, ptr, size),
    "ggml_threadpool_params_init": (None, C.POINTER(ThreadPoolParams), i32),
    "ggml_threadpool_new": (ptr, C.POINTER(ThreadPoolParams)),
    "ggml_threadpool_free": (None, ptr),
}
CPU_FEATURES = (
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8",
    "neon", "dotprod", "matmul_int8", "sve", "llamafile",
)  # fmt: skip


class Library:
    """ggml's functions as attributes, with their C types declared. `path` is the folder or file they came from."""

    def __init__(self, base: C.CDLL, cpu: C.CDLL, path: Path) -> None:
        self.path = path
        self.base = base
        self.known_devices: list[Device] | None = None  # see device.py; None: nobody has asked
        # With its default the log callback prints "gguf_init: ..." lines to stderr; our one-line errors replace them.
        self._silent = C.CFUNCTYPE(None, i32, text, ptr)(lambda level, message, user: None)
        self.declare(_BASE)
        self.declare(_CPU, cpu)
        for name in ("ggml_type_size", "ggml_blck_size"):  # asked for many times for each tensor of a graph
            setattr(self, name, functools.cache(getattr(self, name)))
        log_set = base.ggml_log_set
        log_set.restype, log_set.argtypes = None, [ptr, ptr]
        log_set(C.cast(self._silent, ptr), None)
        self._cpu = cpu
        self.version = self.ggml_version().decode()
        numbers = tuple(int(n) for n in re.findall(r"\d+", self.version)[:3])
        if numbers < OLDEST:
            raise GgmlError(
                f"ggml {self.version} in {path} is too old: Sluice needs {'.'.join(map(str, OLDEST))} or newer"
            )
        self.tried = numbers <= NEWEST_TRIED

    def declare(self, calls: dict[str, tuple], library: C.CDLL | None = None) -> None:
        """Make `calls`, by name their result's and arguments' types, attributes: of `library`, or of ggml-base."""
        for name, (result, *arguments) in calls.items():
            try:
                function = getattr(library or self.base, name)
            except AttributeError:
                raise GgmlError(
                    f"the ggml in {self.path} has no {name}: use libggml-python 0.20.2 to 0.25.1, or one of that age"
                ) from None
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    @property
    def folder(self) -> Path:
        """Where its libraries lie, and those of other backends beside them."""
        return self.path if self.path.is_dir() else self.path.parent

    def __getattr__(self, name: str):  # for type checkers: the calls are set in __init__
        raise AttributeError(name)

    def features(self) -> list[str]:
        """Instruction sets that the CPU library was built to use and finds on this machine."""
        found = []
        for name in CPU_FEATURES:
            probe = getattr(self._cpu, f"ggml_cpu_has_{name}", None)
            if probe is not None and probe():
                found.append(name)
        return found


def find_libraries(folder: Path, part: str) -> list[Path]:
    """The libraries `ggml-PART` or `ggml-PART-VARIANT` of a folder, searched a few levels deep."""
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    for depth in ("", "*/", "*/*/"):
        for prefix in ("lib", ""):
            stem = f"{prefix}ggml-{part}"
            found = [*folder.glob(f"{depth}{stem}{suffix}"), *sorted(folder.glob(f"{depth}{stem}-*{suffix}"))]
            if found:
                return found
    return []


def _best(variants: list[Path]) -> C.CDLL:
    """The CPU library that suits this machine best, by the score each variant gives itself (0: it can't run here)."""
    if len(variants) == 1:
        return C.CDLL(str(variants[0]))
    best, best_score = None, 0
    for path in variants:
        try:
            library = C.CDLL(str(path))
            score = library.ggml_backend_score()
        except (OSError, AttributeError):
            continue
        if score > best_score:
            best, best_score = library, score
    if best is None:
        raise OSError("no CPU variant runs on this machine")
    return best


def _load_folder(folder: Path) -> Library:
    base, cpus = find_libraries(folder, "base"), find_libraries(folder, "cpu")
    if not base or not cpus:
        raise GgmlError(f"no ggml-base and ggml-cpu library in {folder}: name the folder that holds them")
    # ggml-cpu needs ggml-base by its soname, which the loader finds because base is in the process already
    return Library(C.CDLL(str(base[0])), _best(cpus), folder)


def _load_file(path: Path) -> Library:
    """One library that holds everything, or a CPU variant with ggml-base beside it."""
    base = find_libraries(path.parent, "base")
    if base:
        return Library(C.CDLL(str(base[0])), C.CDLL(str(path)), path)
    whole = C.CDLL(str(path))
    return Library(whole, whole, path)


_loaded: dict[Path, Library] = {}


def load_library(path: str | Path | None = None) -> Library:
    """Load ggml from `path`, or from the installed `libggml-python`.

    In a folder with several CPU variants the one that suits this machine best is taken. A file names one of them, or
    is a library that holds all of ggml (as llama.cpp's Python packages do).

    Raises GgmlError when there is none, or it lacks a call, or is older than Sluice needs.
    """
    if path is None:
        spec = importlib.util.find_spec("libggml")
        if spec is None or spec.origin is None:
            raise GgmlError("ggml is not installed: pip install libggml-python, or name a folder with its libraries")
        place = Path(spec.origin).parent.resolve()
    else:
        place = Path(path).expanduser().resolve()
    if place not in _loaded:
        try:
            _loaded[place] = _load_file(place) if place.is_file() else _load_folder(place)
        except OSError as e:
            raise GgmlError(f"ggml in {place} does not load on this machine ({e}): reinstall libggml-python") from e
    return _loaded[place]
