"""What all benchmark scripts share: options, the report with its header, percentiles, progress."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import math
import os
import platform
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
MIB = 2**20

# Steps of AppWorld: one that does nothing, and one that makes some API calls.
NO_OP = "x = 1"
API_CALLS = "print(apis.api_docs.show_app_descriptions())\nprint(apis.supervisor.show_profile())"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A script's options, with those that all have. `doc` is the script's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    return made


def count(text: str) -> int:
    """An option's value: 1, 2, …"""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def appworld_root(text: str) -> Path:
    """An option's value: a folder with AppWorld's `data` in it."""
    root = Path(text).resolve()
    if not (root / "data" / "tasks").is_dir():
        raise argparse.ArgumentTypeError(
            f"{root} has no data/tasks; `python -m aioenv appworld demo-data DIR [--rows 370000]` builds a root"
        )
    return root


def task_ids(root: Path) -> list[str]:
    """All tasks of an AppWorld root."""
    return sorted(folder.name for folder in (root / "data" / "tasks").iterdir() if (folder / "specs.json").is_file())


def fenced(code: str) -> dict[str, Any]:
    """The assistant's message that runs `code` in AppWorld."""
    return {"role": "assistant", "content": f"```python\n{code}\n```"}


def require(package: str) -> Any:
    """An optional package; ends the script with what to do where it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise SystemExit(f"this needs {package}: pip install {package.partition('.')[0]} ({error})") from None


def progress(total: int, unit: str, what: str = "") -> Any:
    """A progress bar on stderr: `update(n)`, `close()`, or a `with` block."""
    return require("tqdm").tqdm(total=total, unit=unit, desc=what or None, file=sys.stderr, leave=False)


def end_on_sigterm() -> None:
    """SIGTERM unwinds the script as Ctrl-C does, so that `finally` ends what it started."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


# -- figures -----------------------------------------------------------------------------------------------------------


def percentile(values: Iterable[float], share: float) -> float:
    """Linear between the closest ranks; nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * share
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Iterable[float]) -> float:
    """nan of nothing."""
    return percentile(values, 0.5)


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    """A route's summary, in milliseconds."""
    return {
        "count": len(seconds),
        "p50_ms": median(seconds) * 1e3,
        "p95_ms": percentile(seconds, 0.95) * 1e3,
        "max_ms": max(seconds, default=math.nan) * 1e3,
    }


# -- the report --------------------------------------------------------------------------------------------------------


class Report:
    """Tables on stdout under a header that says where, when and how they were made; the same figures as JSON."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._machine = machine()
        self._command = shlex.join(["python", *sys.argv])
        self.results: dict[str, Any] = {}
        where = self._machine
        print(f"{name}, {self._date}")
        print(
            f"{where['cores']} cores ({where['cpu']}), {where['memory_gib']:.1f} GiB,"
            f" Linux {where['kernel']}, Python {where['python']}, load {where['load_average']:.1f} at the start"
        )
        print(self._command, flush=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
        """The first column to the left, the others to the right; floats are rounded to what can be read."""
        texts = [list(columns), *([_text(value) for value in row] for row in rows)]
        widths = [max(len(row[index]) for row in texts) for index in range(len(columns))]
        print(f"\n{title}" if title else "")
        for row in texts:
            cells = [
                row[0].ljust(widths[0]),
                *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)),
            ]
            print("  ".join(cells).rstrip())
        sys.stdout.flush()

    def say(self, line: str) -> None:
        print(line, flush=True)

    def write(self, file: Path | None) -> None:
        """`results` and the header, to `file` if there is one."""
        if file is None:
            return
        body = {
            "benchmark": self._name,
            "date": self._date,
            "machine": self._machine,
            "command": self._command,
            "results": _without_nan(self.results),
        }
        file.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _line_of("/proc/cpuinfo", "model name") or platform.machine(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def memory_available() -> int:
    """Bytes that the machine can still give."""
    return int(_line_of("/proc/meminfo", "MemAvailable").split()[0]) * 1024


def _line_of(file: str, key: str) -> str:
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return ""


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _without_nan(value: Any) -> Any:
    """JSON has no nan."""
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
