"""`sluice doctor`: whether this machine suits streaming, and how fast its disk reads experts."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice import __version__
from sluice.cli.machine import cpu_name, filesystem_of, memory, read_ahead_kb
from sluice.cli.opening import load_ggml, resolve_model
from sluice.cli.options import Json
from sluice.cli.terminal import emit, note, print_facts, progress_bar
from sluice.config import format_size, usable_cores
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.ggml import Library

DEPTHS, SECONDS = (1, 4, 8), 1.0
PROBE_BYTES, PROBE_READ_BYTES = 256 << 20, 1 << 20  # without a model: a file to read from, and a usual expert part
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "glusterfs", "afs", "lustre"}
IN_MEMORY = {"tmpfs", "ramfs"}
Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Whose disk to measure. Default: the demo model, or a file written for it."),
]
Ggml = Annotated[str | None, typer.Option("--ggml", metavar="PATH", help="A folder with other ggml libraries.")]


def doctor(model: Model = None, ggml: Ggml = None, json: Json = False) -> int:
    """Check the machine: cores, memory, ggml, and the disk's speed at the size and depths at which experts are read.

    Takes a few seconds. Without a model, and before the demo model is built, it writes a file of 256 MB to the cache
    folder and deletes it.
    """
    library = load_ggml(ggml)
    report: dict[str, Any] = {
        "sluice": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "cores_of_machine": os.cpu_count(),
        **memory(),
        "ggml": {
            "version": library.version,
            "tried": library.tried,
            "features": library.features(),
            "from": str(library.path),
        },
    }
    report["devices"] = _devices(library)
    with _probe_file(model) as path:
        report["disk"] = None if path is None else _disk(path, model is not None, library)
    report["warnings"] = warnings(report)
    if json:
        emit(report)
    else:
        _show(report)
    return 0


def _devices(library: Library) -> list[dict[str, Any]]:
    """Devices beside the processor that the ggml in use brings: their memory, and how fast bytes move there."""
    from sluice.errors import GgmlError
    from sluice.ggml import devices
    from sluice.plan.device_probe import measure_device

    found = []
    for device in devices(library):
        free, total = device.memory()
        about = {"name": device.name, "description": device.description, "kind": device.kind}
        try:
            speeds = asdict(measure_device(device))
        except GgmlError as error:
            note(f"{device.name} was not measured: {error}")
            speeds = {}
        found.append({**about, "memory_bytes": total, "memory_free_bytes": free, **speeds})
    return found


@contextmanager
def _probe_file(model: str | None) -> Iterator[Path | None]:
    """A file to measure reading with: the model's, the demo's, or one made for it; None where none can be written."""
    from sluice.demo import demo_path

    built = demo_path()
    if model is not None and model != "demo":
        yield resolve_model(model)
        return
    if built.exists():
        yield built
        return
    if model == "demo":
        raise InputError("the demo model is not built yet: `sluice run` builds it; or leave out MODEL")
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=built.parent, prefix=".sluice-doctor-") as file:
            with progress_bar("writing a file to read") as progress:
                for done in range(0, PROBE_BYTES, 1 << 24):
                    file.write(os.urandom(1 << 24))
                    progress(done, PROBE_BYTES)
                file.flush()
                os.fsync(file.fileno())
            yield Path(file.name)
    except OSError as error:
        note(
            f"the disk was not measured: {built.parent} can't be written ({error.strerror or error}): free space there"
        )
        yield None


def _disk(path: Path, is_model: bool, library: Library) -> dict[str, Any]:
    """What the disk under `path` does. Raises ModelFileError for a file that is no model Sluice runs."""
    from sluice.gguf import open_gguf
    from sluice.io.files import ModelFiles
    from sluice.io.probe import measure_read
    from sluice.io.readers import auto_name
    from sluice.models import family_of
    from sluice.store import expert_layout

    paths, n_bytes, number, in_place = (path,), PROBE_READ_BYTES, 0, True
    if is_model or path.suffix == ".gguf":
        file = open_gguf(path, library)
        spec = family_of(file).read_spec(file)
        paths = file.paths
        with ModelFiles(paths) as files:
            layout = expert_layout(file, spec.moe_layers, [files[i].block for i in range(len(files))])
        run = layout.runs[spec.moe_layers[0]][0]
        n_bytes, number, in_place = run.n_bytes, run.file, layout.in_place
    with ModelFiles(paths) as files, progress_bar("measuring the disk") as progress:
        measured = {}
        for i, depth in enumerate(DEPTHS):
            progress(i, len(DEPTHS))
            rate = measure_read(files, file=number, n_bytes=n_bytes, depth=depth, seconds=SECONDS)
            measured[str(depth)] = rate.bytes_per_s
        opened = files[number]
        return {
            "path": str(opened.path),
            "file_system": filesystem_of(opened.path),
            "read_bytes": n_bytes,
            "bytes_per_s": measured,  # by depth
            "mode": opened.mode,
            "block_bytes": opened.block,
            "reader": auto_name(files, in_place),
            "read_ahead_kb": read_ahead_kb(opened.path),
        }


def warnings(report: dict[str, Any]) -> list[str]:
    """What of a report speaks against streaming on this machine, with a remedy each."""
    found = []
    if report["cores"] < 4:
        found.append(f"usable cores: {report['cores']}; reading takes a share of them, so arithmetic may be the bound")
    if (limit := report["memory_limit_bytes"]) is not None and limit < (report["memory_bytes"] or 0):
        found.append(f"a control group limits memory to {format_size(limit)}: keep --ram below that")
    if not report["ggml"]["tried"]:
        found.append(f"ggml {report['ggml']['version']} is newer than any that Sluice was tried with")
    if platform.machine().lower() in ("x86_64", "amd64") and "avx2" not in report["ggml"]["features"]:
        found.append("ggml does not use AVX2 here: arithmetic will be slow; try another ggml with --ggml")
    if sys.platform != "linux":
        found.append(f"Sluice was not run on {sys.platform} before: tell how it went")
    disk = report["disk"]
    if disk is None:
        return found
    kind = disk["file_system"]
    if kind in IN_MEMORY:
        found.append(f"the file is on {kind}, which is memory: move it to a disk, or streaming saves nothing")
    elif kind in NETWORK:
        found.append(f"the file is on a network file system ({kind}): copy it to a local disk")
    if disk["mode"] == "buffered" and kind not in IN_MEMORY:
        found.append("the file system refuses reads past the page cache: experts pass through it; try another disk")
    slow, fast = disk["bytes_per_s"]["1"], max(disk["bytes_per_s"].values())
    if fast < 500e6:
        found.append(f"the disk reads {fast / 1e6:.0f} MB/s at best: a solid-state disk would help most")
    elif disk["bytes_per_s"]["8"] < 0.8 * slow:
        found.append("the disk reads slower with several requests at once: try --io-threads 1")
    return found


def _show(report: dict[str, Any]) -> None:
    ggml, disk = report["ggml"], report["disk"]
    size = {name: "unknown" if n is None else format_size(n) for name, n in report.items() if name.startswith("memory")}
    limit = (
        "" if report["memory_limit_bytes"] is None else f", limited to {size['memory_limit_bytes']} by a control group"
    )
    facts = [
        ("sluice", f"{report['sluice']}, Python {report['python']}, {report['system']}"),
        ("processor", f"{report['cpu']}, {report['cores']} of {report['cores_of_machine']} cores usable"),
        ("memory", f"{size['memory_bytes']}, {size['memory_free_bytes']} free{limit}"),
        ("ggml", f"{ggml['version']} ({', '.join(ggml['features']) or 'no features'}) from {ggml['from']}"),
    ]
    facts += [(device["name"], _device_text(device)) for device in report["devices"]]
    if disk is not None:
        speeds = ", ".join(f"{rate / 1e6:,.0f} MB/s at depth {depth}" for depth, rate in disk["bytes_per_s"].items())
        how = {"direct": "past the page cache (O_DIRECT)", "nocache": "past the page cache (F_NOCACHE)"}
        past = how.get(disk["mode"], "through the page cache")
        ahead = "unknown" if disk["read_ahead_kb"] is None else f"{disk['read_ahead_kb']} KB (not used by Sluice)"
        facts += [
            ("disk", f"{disk['path']} on {disk['file_system'] or 'an unknown file system'}"),
            ("reading", f"{speeds}, {format_size(disk['read_bytes'])} at a time"),
            ("reads go", f"{past}, blocks of {disk['block_bytes']} bytes, by {disk['reader']}"),
            ("read-ahead", ahead),
        ]
    print_facts([*facts, *(("warning", text) for text in report["warnings"])])


def _device_text(device: dict[str, Any]) -> str:
    size = f"{format_size(device['memory_bytes'])}, {format_size(device['memory_free_bytes'])} free"
    if "up_bytes_per_s" not in device:
        return f"{device['description']}, {size}"
    speeds = {name: device[f"{name}_bytes_per_s"] / 1e9 for name in ("memory", "up", "down")}
    return (
        f"{device['description']}, {size}, {speeds['memory']:,.1f} GB/s of its own, copies there {speeds['up']:,.1f}, "
        f"back {speeds['down']:,.1f}"
    )
