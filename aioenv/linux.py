"""What Python's standard library does not offer of the Linux kernel."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 2**20


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def become_subreaper() -> None:
    """Descendants that lose their parent become this process's children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int, parent: int) -> None:
    """Get `signal_number` when the thread that started this process ends; at once if `parent` is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def collapse_memory() -> None:
    """Put this process's memory into huge pages, where the kernel can (Linux 6.1 and newer).

    A fork copies the page tables, which takes as many milliseconds as there are 30 MB of small pages; huge pages have
    next to none. What a child writes to is copied in small pages all the same.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line.split() for line in maps]
    for span, access, _, _, _, *name in lines:
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in span.split("-"))
            start, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
            if start < end:
                libc.madvise(start, end - start, _MADV_COLLAPSE)  # best effort: what it refuses stays as it is


def private_memory(pid: int) -> int | None:
    """Bytes that would be free if this process ended; None if it has. Takes milliseconds for a large process."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
            return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Private_"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
