"""Processes of the benchmarks: a server from start to end, and what a process tree uses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
START_LIMIT = 300.0  # seconds
STOP_LIMIT = 60.0  # seconds
_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Served:
    """A server that is ready."""

    url: str
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Served]:
    """`python -m aioenv serve OPTIONS`, of this checkout, on a free port, for as long as the block lasts."""
    command = [sys.executable, "-m", "aioenv", "serve", "--port", "0", "--log-level", "warning", *options]
    with started(command) as served:
        yield served


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[Served]:
    """A server which prints `listening on URL…` and then `ready`. Ended by SIGTERM, after a while by SIGKILL."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, preexec_fn=_end_with_parent)
    assert popen.stdout is not None
    alarm = threading.Timer(START_LIMIT, popen.kill)
    alarm.start()
    try:
        url = ""
        for line in popen.stdout:
            if line.startswith("listening on "):
                url = line.removeprefix("listening on ").partition(",")[0].strip()
            if line.strip() == "ready":
                break
        else:
            raise SystemExit(f"it ended before it was ready, with code {popen.wait()}: {' '.join(command)}")
        alarm.cancel()
        yield Served(url, popen.pid)
    finally:
        alarm.cancel()
        if popen.poll() is None:
            popen.send_signal(signal.SIGTERM)
        try:
            popen.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            print(f"{popen.pid} did not end within {STOP_LIMIT:g} s of SIGTERM: SIGKILL", file=sys.stderr)
        finally:
            popen.kill()
            popen.wait()
            popen.stdout.close()


def _end_with_parent() -> None:
    """In the server, before its program: even a benchmark that is killed leaves nothing behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def raise_open_files(wanted: int) -> int:
    """Let this process and its children have `wanted` open files, if the system allows; how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    with contextlib.suppress(ValueError, OSError):  # only root may raise the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
        return wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


# -- trees -------------------------------------------------------------------------------------------------------------


def tree(root: int) -> list[int]:
    """`root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
                children.setdefault(int(fields.split()[1]), []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def pss(pids: Iterable[int], each: Callable[[], object] = lambda: None) -> int:
    """Bytes of memory of some processes, what they share counted once. `each` is called after each of them."""
    total = 0
    for pid in pids:
        total += _rollup(pid, "Pss:")
        each()
    return total


def private(pid: int) -> int:
    """Bytes that would be free if the process ended; 0 if it has."""
    return _rollup(pid, "Private_")


def _rollup(pid: int, prefix: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:
        raise SystemExit(f"can't read the memory of process {pid}: run this as its user") from None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(prefix))


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that living processes have used."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def uses_uvloop(pid: int) -> bool:
    """Whether the process has uvloop loaded."""
    return "/uvloop/" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
