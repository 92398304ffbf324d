"""What Python's standard library does not offer of the Linux kernel."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 2**20
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def set_subreaper(on: bool) -> None:
    """Whether descendants that lose their parent become this process's children. Not inherited by a fork."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


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


def resident_memory(pid: int) -> int | None:
    """Bytes that the process has in memory, shared ones included; None if it has ended. Takes microseconds."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return None


def data_size() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[5]) * _PAGE


def children_of(pid: int) -> list[int]:
    """Its living and dead children, of all its threads; none if it has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as children:
                found += map(int, children.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def descendants_of(pid: int) -> list[int]:
    """Its children, their children and so on, but those that lost their parent."""
    found = children_of(pid)
    for child in found:  # grows meanwhile
        found += children_of(child)
    return found


def prefer_for_oom_kill() -> None:
    """Where the machine runs out of memory, the kernel is to end this process before those that did not ask for it."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("500")
    except OSError:
        pass  # forbidden in some containers


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory, since the machine started."""
    try:
        with open("/proc/vmstat", encoding="ascii") as vmstat:
            return next((int(line.split()[1]) for line in vmstat if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def cores() -> float:
    """Cores that this process may use: by its affinity, and by the quota of its container (cgroup v2)."""
    mine = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = _read_cgroup("cpu.max").split()
        return mine if quota == "max" else min(mine, int(quota) / int(period))
    except (OSError, ValueError):
        return mine


def available_memory() -> int:
    """Bytes that can be had: free on the machine, and within the limit of its container (cgroup v2)."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    try:
        limit = _read_cgroup("memory.max").strip()
        return free if limit == "max" else max(0, min(free, int(limit) - int(_read_cgroup("memory.current"))))
    except (OSError, ValueError):
        return free


def _read_cgroup(file: str) -> str:
    # Inside a container its own group is the root of what it sees.
    with open(f"/sys/fs/cgroup/{file}", encoding="ascii") as value:
        return value.read()
