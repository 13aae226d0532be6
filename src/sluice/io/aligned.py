"""Page-aligned anonymous memory. It does not know what is kept in it."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

from sluice.errors import BudgetError

HUGE_PAGE = 2 << 20  # bytes; x86-64 and most arm64 kernels


def address_of(view: memoryview) -> int:
    """The address of a writable view's first byte. The view must outlive every use of it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class AlignedBuffer:
    """`n_bytes` of zeroed memory whose first byte lies on a page border; pages cost nothing until they are touched.

    From HUGE_PAGE bytes on it asks for huge pages, where the system has them: a direct read pins its destination page
    by page, and into small pages that costs a third of a fast disk's rate.

    `view` is a writable memoryview of bytes, `address` the address of its first byte. Raises BudgetError where the
    machine refuses the memory. A context manager.
    """

    def __init__(self, n_bytes: int) -> None:
        if n_bytes <= 0:
            raise ValueError(f"a buffer needs a positive size, not {n_bytes}")
        try:
            if sys.platform == "win32":
                mapped = mmap.mmap(-1, n_bytes)
            else:  # private: Python's default, a shared map, would be accounted as shared memory and survive a fork
                mapped = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise BudgetError(
                f"the system refuses {n_bytes} bytes of memory ({error}); choose a smaller --ram"
            ) from error
        self.n_bytes = n_bytes
        if n_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without them
                mapped.madvise(mmap.MADV_HUGEPAGE)
        self._map: mmap.mmap | None = mapped
        self.view = memoryview(mapped)
        self.address = address_of(self.view)

    def close(self) -> None:
        """Give the memory back; may be called again.

        Where somebody else still holds a view of it, the memory goes with the last of those views instead.
        """
        view, mapped = self.view, self._map
        self.view, self._map = memoryview(b""), None
        self.view.release()  # so that a use after close raises
        with suppress(BufferError):
            view.release()
            if mapped is not None:
                mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
