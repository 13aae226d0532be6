"""Model files opened for reading past the page cache. It does not know what is in them, or where the bytes go."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from sluice.errors import ModelFileError, ReadError
from sluice.io.aligned import AlignedBuffer

_STATX_DIOALIGN = 0x2000  # linux/stat.h
_STATX_DIO_FIELDS = 0x98  # byte offset of stx_dio_mem_align, stx_dio_offset_align (two u32) in struct statx
_AT_EMPTY_PATH = 0x1000
_NOCACHE_BLOCK = 4096  # macOS takes any offset with F_NOCACHE, but goes straight to the disk only for whole blocks


@dataclass(frozen=True)
class OpenFile:
    """One open file. `size` and `mtime_ns` are those at open.

    `mode` is `direct` (O_DIRECT), `nocache` (macOS F_NOCACHE) or `buffered` (through the page cache, dropped after
    each read where the platform can). In the first two, reads go in whole blocks of `block` bytes, in the file and in
    memory; a buffered file has `block` 1.
    """

    path: Path
    fd: int
    size: int
    mtime_ns: int
    mode: str
    block: int
    turns: threading.Lock = field(default_factory=threading.Lock, repr=False)  # seek + read, where pread is missing

    @property
    def direct(self) -> bool:
        """Reads bypass the page cache."""
        return self.mode != "buffered"

    def change(self) -> str | None:
        """How the file differs from when it was opened; None if it doesn't."""
        try:
            now = os.fstat(self.fd)
        except OSError as error:
            return f"it can no longer be examined ({error.strerror})"
        if now.st_size != self.size:
            return f"its size went from {self.size} to {now.st_size} bytes"
        return None if now.st_mtime_ns == self.mtime_ns else "it was written to"


class ModelFiles:
    """One or more files (shards), open for reading by any number of threads until close(). A context manager.

    Raises ModelFileError for a path that can't be opened or is no regular file. O_DIRECT is used where the file system
    takes it; tmpfs, some network file systems and Windows are read through the page cache. The macOS and Windows
    branches have not been run.
    """

    by_descriptor = True  # whoever reads the descriptors reads what `read_into` does

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._files: list[OpenFile] = []
        try:
            for path in paths:
                self._files.append(_open(Path(path)))
        except BaseException:
            self.close()
            raise
        if not self._files:
            raise ValueError("no file given")

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, file: int) -> OpenFile:
        return self._files[file]

    @property
    def direct(self) -> bool:
        """Every file bypasses the page cache."""
        return all(file.direct for file in self._files)

    @property
    def block(self) -> int:
        """The largest block of any file, bytes; a power of two, no more than a page."""
        return max(file.block for file in self._files)

    def read_into(self, file: int, offset: int, view: memoryview) -> int:
        """Fill `view` from byte `offset` of file number `file`; returns the bytes read.

        Fewer than `len(view)` only where the file, as it was at open, ends. `offset`, `len(view)` and the view's
        address must be multiples of the file's block. Raises ReadError on a failed read or a file that became shorter.
        """
        f = self._files[file]
        try:
            got = _pread(f, offset, view)
            if got < len(view):
                got = self._read_rest(file, offset, view, got)
        except OSError as error:
            raise self.failed(file, offset, len(view), error) from error
        if f.block == 1:
            _drop_cache(f.fd, offset, got)
        return got

    def read_exact(self, file: int, offset: int, view: memoryview, scratch: AlignedBuffer) -> int:
        """Fill `view` from any `offset` into any memory, through `scratch`, in pieces where it is smaller.

        `scratch` holds at least a block. Returns the bytes fetched from disk. Raises ReadError as read_into does, and
        where the file ends inside the range.
        """
        block = self._files[file].block
        room = scratch.n_bytes // block * block
        if room == 0:
            raise ValueError(f"scratch memory of {scratch.n_bytes} bytes is smaller than a block of {block}")
        done = fetched = 0
        while done < len(view):
            skew = (offset + done) % block
            n = min(len(view) - done, room - skew)
            whole = -(-(skew + n) // block) * block
            got = self.read_into(file, offset + done - skew, scratch.view[:whole])
            if got < skew + n:
                raise self.short(file, offset, len(view), done + max(got - skew, 0))
            copy(view, done, scratch, skew, n)
            done += n
            fetched += got
        return fetched

    def failed(self, file: int, offset: int, n_bytes: int, error: OSError) -> ReadError:
        """The error for a read that the system refused."""
        f = self._files[file]
        name = errno.errorcode.get(error.errno or 0, "?")
        return ReadError(
            f"{f.path}: reading {n_bytes} bytes at offset {offset} failed: {error.strerror or error} "
            f"(errno {error.errno}, {name}){_because(f)}; check the disk and the file, then start again"
        )

    def short(self, file: int, offset: int, expected: int, got: int) -> ReadError:
        """The error for a range that the file doesn't hold in full."""
        f = self._files[file]
        return ReadError(
            f"{f.path}: the file ends inside the {expected} bytes at offset {offset}, {got} came"
            f"{_because(f)}; the file is truncated, get it again"
        )

    def changed(self) -> str | None:
        """One line naming a file that changed since open and how, or None. One fstat a file: cheap enough per step."""
        for f in self._files:
            if how := f.change():
                return f"{f.path}: the file changed while running, {how}; leave model files alone, then start again"
        return None

    def drop_cache(self) -> None:
        """Ask the system to forget cached pages of all files, where it can be asked."""
        for f in self._files:
            _drop_cache(f.fd, 0, f.size)

    def close(self) -> None:
        """Close all files. No read may be running. May be called again."""
        while self._files:
            os.close(self._files.pop().fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_rest(self, file: int, offset: int, view: memoryview, got: int) -> int:
        """Go on after a short read, until the view is full or the file, as it was at open, ends."""
        f = self._files[file]
        while got < len(view) and offset + got < f.size:
            at = got - got % f.block  # a direct read can only go on from a block's border
            end = at + _pread(f, offset + at, view[at:])
            if end <= got:
                raise self.short(file, offset, min(len(view), f.size - offset), got)
            got = end
        return got


def copy(to: memoryview, to_at: int, scratch: AlignedBuffer, at: int, n: int) -> None:
    """Copy `n` bytes of scratch memory without holding the GIL, unlike an assignment between views."""
    part = to[to_at : to_at + n]
    if len(part) != n or at + n > scratch.n_bytes:
        raise ValueError(f"{n} bytes at {to_at} don't fit a buffer of {len(to)}")
    if n:
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(part)), scratch.address + at, n)


def _because(f: OpenFile) -> str:
    how = f.change()
    return f"; the file changed while running, {how}" if how else ""


def _pread(f: OpenFile, offset: int, view: memoryview) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(f.fd, (view,), offset)
    with f.turns:  # Windows: one position per descriptor, so reads of one file take turns
        os.lseek(f.fd, offset, os.SEEK_SET)
        with open(f.fd, "rb", buffering=0, closefd=False) as raw:
            return raw.readinto(view) or 0


def _drop_cache(fd: int, offset: int, n: int) -> None:
    if hasattr(os, "posix_fadvise"):
        start = offset - offset % mmap.PAGESIZE  # only pages wholly inside the range are dropped
        end = -(-(offset + n) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


def _open(path: Path) -> OpenFile:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise ModelFileError(f"{path} is not a regular file; give the path of a GGUF file")
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
        fd, block = _open_direct(path, flags)
        mode = "direct"
        if fd is None:
            fd, block, mode = os.open(path, flags), 1, "buffered"
    except OSError as error:
        raise ModelFileError(
            f"{path} can't be opened: {error.strerror or error}; check the path and its permissions"
        ) from error
    try:
        if mode == "buffered":
            block, mode = _uncached(fd)
        at_open = os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise
    return OpenFile(path, fd, at_open.st_size, at_open.st_mtime_ns, mode, block)


def _open_direct(path: Path, flags: int) -> tuple[int | None, int]:
    """Descriptor and block size for O_DIRECT; None where the platform or file system refuses it."""
    if not hasattr(os, "O_DIRECT"):
        return None, 1
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return None, 1
        raise
    try:
        told = _statx_block(fd)
        for block in (512, 4096) if told is None else (told,):
            if 0 < block <= mmap.PAGESIZE and block & (block - 1) == 0 and _takes(fd, block):
                return fd, block
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None, 1


def _takes(fd: int, block: int) -> bool:
    """Whether a direct read of the second block, or past the end, into memory aligned to no more works."""
    with AlignedBuffer(2 * mmap.PAGESIZE) as buffer, buffer.view[block : 2 * block] as view:
        try:
            os.preadv(fd, (view,), block)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return False
            raise
        return True


def _statx_block(fd: int) -> int | None:
    """The file's unit for direct I/O in bytes, 0 if it takes none, None if the kernel doesn't say (statx(2))."""
    buffer = ctypes.create_string_buffer(256)
    try:
        statx = ctypes.CDLL(None).statx
    except (AttributeError, OSError):
        return None
    statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None
    if not int.from_bytes(buffer[:4], sys.byteorder) & _STATX_DIOALIGN:
        return None
    in_memory, in_file = (
        int.from_bytes(buffer[at : at + 4], sys.byteorder) for at in (_STATX_DIO_FIELDS, _STATX_DIO_FIELDS + 4)
    )
    return max(in_memory, in_file)


def _uncached(fd: int) -> tuple[int, str]:
    """Block size and mode of a file opened without O_DIRECT, after asking for as little caching as there is."""
    if sys.platform == "darwin":
        import fcntl  # not on Windows

        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return _NOCACHE_BLOCK, "nocache"
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead beyond what is asked
    return 1, "buffered"
