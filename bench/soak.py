"""A long run of chaos.py against a server of its own: does it hold, and does the server grow?

    python bench/soak.py --minutes 20

Episodes go on while worlds, templates and job processes are killed and clients hang up and repeat themselves; every
outcome is checked. Meanwhile the server's memory, files, threads and processes are sampled. What it uses at rest,
before and after, tells what it kept; the slope, over all but the first quarter, whether it keeps more and more. Exit
code 1 on violations.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from chaos import Chaos, ChaosReport
from common import MIB, Report, count, end_on_sigterm, parser
from processes import REPOSITORY, Served, private, serving, tree

CALM_SECONDS = 5.0  # of play without harm, before what the server uses at rest is sampled
SETTLE_SECONDS = 2.0
FLAT = 0.1  # of the mean: what grows by less while it is watched is taken for flat
FEWEST = 10  # samples that a slope is told of
SHOWN = 20  # violations


@dataclass(frozen=True)
class Sample:
    """What the server used, `seconds` after the beginning."""

    seconds: float
    rss_mib: float
    private_mib: float
    files: int
    threads: int
    descendants: int
    scratch_mib: float


METRICS = [metric.name for metric in fields(Sample)][1:]


@dataclass
class Soaked:
    """What was seen: the outcomes, and what the server used at rest (before and after) and in between."""

    report: ChaosReport
    rest: list[Sample]
    run: list[Sample]


def main() -> None:
    args = _options()
    end_on_sigterm()
    report = Report("soak")
    with tempfile.TemporaryDirectory(prefix="aioenv-soak-") as name:
        folder = Path(name)
        options = (
            "--env",
            "count",
            "--env-dir",
            str(REPOSITORY / "tests" / "envs"),
            "--scratch",
            str(folder / "scratch"),
        )
        with serving(*options, "--log-level", "error") as served:  # it would warn of each kill
            soaked = asyncio.run(_run(args, served, folder, report))
    _show(report, soaked)
    report.write(args.json)
    if args.csv is not None:
        _write_csv(args.csv, soaked.run)
    if soaked.report.violations:
        raise SystemExit(1)


async def _run(args: argparse.Namespace, served: Served, folder: Path, report: Report) -> Soaked:
    began = time.monotonic()

    async def sample() -> Sample:
        return await asyncio.to_thread(_sample, served.pid, folder / "scratch", began)

    async def rest() -> Sample:
        await chaos.play(CALM_SECONDS, harm=False)
        await asyncio.sleep(SETTLE_SECONDS)
        return await sample()

    async def watch() -> None:
        minute = 0
        while True:
            run.append(await sample())
            if run[-1].seconds // 60 > minute:
                minute = int(run[-1].seconds // 60)
                report.say(_progress(minute, chaos.report, run[-1]))
            await asyncio.sleep(args.interval)

    chaos = Chaos(served.url, served.pid, folder / "ledger", args.worlds)
    run: list[Sample] = []
    before = await rest()
    watcher = asyncio.create_task(watch())
    try:
        await chaos.play(args.minutes * 60)
    finally:
        watcher.cancel()
    after = await rest()
    return Soaked(chaos.finish(), [before, after], run)


def _sample(pid: int, scratch: Path, began: float) -> Sample:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    return Sample(
        seconds=time.monotonic() - began,
        rss_mib=int(status["VmRSS"].split()[0]) * 1024 / MIB,
        private_mib=private(pid) / MIB,
        files=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
        descendants=len(tree(pid)) - 1,
        scratch_mib=_size(scratch) / MIB,
    )


def _size(folder: Path) -> int:
    """Bytes of the files in it, which come and go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _progress(minute: int, report: ChaosReport, sample: Sample) -> str:
    return (
        f"minute {minute}: {report.episodes:,} episodes, {report.steps:,} steps, {report.replays:,} replays,"
        f" {report.kills.total():,} kills, {len(report.violations)} violations,"
        f" {sample.rss_mib:.1f} MiB, {sample.files} files, {sample.descendants} processes"
    )


def _show(report: Report, soaked: Soaked) -> None:
    outcome = {**vars(soaked.report)}
    violations = outcome.pop("violations")
    kills, failures = outcome.pop("kills"), outcome.pop("failures")
    counts = {
        **outcome,
        **{f"kills, {kind}": times for kind, times in sorted(kills.items())},
        **{f"failures, {what}": times for what, times in sorted(failures.items())},
        "violations": len(violations),
    }
    report.table(("", ""), counts.items())
    for sentence in violations[:SHOWN]:
        report.say(f"VIOLATION {sentence}")
    usage = {metric: _usage(soaked, metric) for metric in METRICS}
    report.table(
        ("the server", "at rest before", "after", "in the run first", "last", "slope per hour", ""),
        [(metric, *figures.values()) for metric, figures in usage.items()],
    )
    report.results = {"counts": counts, "violations": violations, "usage": usage}


def _usage(soaked: Soaked, metric: str) -> dict[str, Any]:
    """A metric's first and last values, and its growth per hour over all but the first quarter of the run."""
    seconds = [sample.seconds for sample in soaked.run]
    values = [float(getattr(sample, metric)) for sample in soaked.run]
    before, after = (getattr(sample, metric) for sample in soaked.rest)
    start = len(values) // 4
    slope, verdict = _slope(seconds[start:], values[start:]), "too short to tell"
    if not math.isnan(slope):
        growth = slope * (seconds[-1] - seconds[start])
        verdict = "flat" if growth <= FLAT * statistics.fmean(values[start:]) else "GROWS"
    return {
        "before": before,
        "after": after,
        "first": values[0],
        "last": values[-1],
        "slope_per_hour": slope * 3600,
        "verdict": verdict,
    }


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the line through the points with the least squares; nan of fewer than FEWEST."""
    return statistics.linear_regression(xs, ys).slope if len(xs) >= FEWEST else math.nan


def _write_csv(file: Path, samples: list[Sample]) -> None:
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["seconds", *METRICS])
        writer.writerows(astuple(sample) for sample in samples)


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=20.0, metavar="M", help="(default: %(default)g)")
    options.add_argument("--worlds", type=count, default=16, metavar="N", help="at once (default: %(default)s)")
    options.add_argument(
        "--interval", type=float, default=10.0, metavar="S", help="between two samples (default: %(default)g)"
    )
    options.add_argument("--csv", type=Path, metavar="FILE", help="write the samples to FILE")
    return options.parse_args()


if __name__ == "__main__":
    main()
