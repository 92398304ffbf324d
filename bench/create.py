"""The time until a world has its initial state, and its memory: fresh process, template, group template, in one run.

    python bench/create.py --root SMALL --rows-root REALISTIC --plot create.png

- fresh process: a new interpreter imports AppWorld and makes the world, as a Ray actor does
- template: a server without group templates forks it from the env's template
- new task: the first create of a task, on a server with group templates: makes the group's template as well
- group template: a further create of that task

They take turns, alone and --at-once. Private memory is what would be free if the world's process ended. With --curve or
--plot, worlds are made one after another and all kept. `python -m aioenv appworld demo-data DIR --rows 370000` builds
data of realistic size. For each root it takes as long as repeats + bursts * at-once / cores fresh processes, which are
3 to 10 s each.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from common import (
    API_CALLS,
    GIB,
    MIB,
    Report,
    appworld_root,
    count,
    end_on_sigterm,
    median,
    memory_available,
    parser,
    percentile,
    progress,
    require,
)
from common import task_ids as tasks_of
from makers import Maker, fresh_processes, service
from processes import private
from stock import warm_up

MEMORY_STOP = 2 * GIB  # no more worlds when less is left


@dataclass
class Kind:
    """One way to make worlds, and what was found. Each takes the next of its tasks."""

    name: str
    maker: Maker
    tasks: Iterator[str]
    alone: list[float] = field(default_factory=list)
    burst: list[float] = field(default_factory=list)
    private: list[int] = field(default_factory=list)
    private_after: list[int] = field(default_factory=list)

    def make_alone(self, steps: int, code: str) -> None:
        (world,) = self.maker.make([next(self.tasks)])
        try:
            self.alone.append(world.seconds)
            if world.pid:
                self.private.append(private(world.pid))
                for _ in range(steps):
                    world.step(code)
                self.private_after.append(private(world.pid))
        finally:
            world.end()

    def make_burst(self, at_once: int) -> None:
        worlds = self.maker.make([next(self.tasks)] * at_once)
        self.burst += [world.seconds for world in worlds]
        for world in worlds:
            world.end()

    def summary(self) -> dict[str, Any]:
        return {
            "creates": len(self.alone),
            "p50_ms": median(self.alone) * 1e3,
            "p95_ms": percentile(self.alone, 0.95) * 1e3,
            "burst_p50_ms": median(self.burst) * 1e3,
            "burst_max_ms": max(self.burst) * 1e3,
            "private_mib": median(self.private) / MIB,
            "private_after_steps_mib": median(self.private_after) / MIB,
        }


def main() -> None:
    args = _options()
    end_on_sigterm()
    if args.plot:
        require("matplotlib.pyplot")
    report = Report("create")
    roots = {"small data": args.root, "realistic data": args.rows_root}
    for label, root in roots.items():
        if root is None:
            continue
        with _kinds(root, args.at_once) as kinds:
            fresh, *forked = kinds
            idle = forked[-1].maker.memory()
            _take_turns(label, kinds, args)
            _show(report, label, kinds, idle, args)
            if args.curve:
                found = {kind.name: _curve(kind, args.curve, label) for kind in forked if kind.name != "new task"}
                found[fresh.name] = _curve(fresh, min(args.curve, args.curve_fresh), label)
                report.results[label]["curve"] = found
                _show_curve(report, label, found)
    report.write(args.json)
    if args.plot:
        from plot import draw

        draw({label: entry["curve"] for label, entry in report.results.items()}, args.plot)
        report.say(f"the plot is in {args.plot}")


@contextlib.contextmanager
def _kinds(root: Path, at_once: int) -> Iterator[list[Kind]]:
    """All of them, over the same data, with what they do once behind them."""
    first, *others = tasks_of(root)
    warm_up(root, first)
    with (
        fresh_processes(root) as fresh,
        service(root, at_once, "--group-templates", "0") as plain,
        service(root, at_once) as groups,
    ):
        for maker in (plain, groups):
            for world in maker.make([first]):
                world.end()
        yield [
            Kind("fresh process", fresh, cycle([first])),
            Kind("template", plain, cycle([first])),
            Kind("new task", groups, cycle(others)),
            Kind("group template", groups, cycle([first])),
        ]


def _take_turns(label: str, kinds: list[Kind], args: argparse.Namespace) -> None:
    fresh, *forked = kinds
    with progress(args.repeats + args.bursts, "turn", label) as bar:
        for _ in range(args.repeats):
            fresh.make_alone(args.steps, args.code)
            for _ in range(args.each):
                for kind in forked:
                    kind.make_alone(args.steps, args.code)
            bar.update()
        for _ in range(args.bursts):
            if memory_available() < MEMORY_STOP:
                raise SystemExit("too little memory is left for a burst of fresh processes")
            for kind in kinds:
                kind.make_burst(args.at_once)
            bar.update()


def _show(report: Report, label: str, kinds: list[Kind], idle: int, args: argparse.Namespace) -> None:
    summaries = {kind.name: kind.summary() for kind in kinds}
    columns = ("", "creates", "p50 ms", "p95 ms", f"{args.at_once} at once, p50 ms", "max ms")
    memory = ("private MiB", f"after {args.steps} steps")
    report.table((*columns, *memory), [(name, *one.values()) for name, one in summaries.items()], label)
    fresh = summaries["fresh process"]
    ratios = {
        name: {
            "alone": fresh["p50_ms"] / one["p50_ms"],
            "at_once": fresh["burst_p50_ms"] / one["burst_p50_ms"],
            "private_after_steps": fresh["private_after_steps_mib"] / one["private_after_steps_mib"],
        }
        for name, one in summaries.items()
        if name != "fresh process"
    }
    report.table(
        ("against a fresh process", "times faster alone", f"{args.at_once} at once", "times less private memory"),
        [(name, *ratio.values()) for name, ratio in ratios.items()],
    )
    report.say(f"the service with one group template and no world: {idle / MIB:.0f} MiB")
    report.results[label] = {"kinds": summaries, "ratios": ratios, "idle_service_mib": idle / MIB}


# -- with many alive ---------------------------------------------------------------------------------------------------


def _curve(kind: Kind, worlds: int, label: str) -> dict[str, list[Any]]:
    """Worlds made one after another, all kept: how long each took, and the memory of all at about ten points.

    Memory is without what the server takes by itself.
    """
    alive = []
    curve: dict[str, list[Any]] = {"seconds": [], "memory_at": [0], "memory": [0]}
    before = kind.maker.memory()
    marks = {round(worlds * part / 10) for part in range(1, 11)}
    try:
        with progress(worlds, "world", f"{label}, {kind.name}") as bar:
            for number in range(1, worlds + 1):
                if memory_available() < MEMORY_STOP:
                    break
                (world,) = kind.maker.make([next(kind.tasks)])
                alive.append(world)
                curve["seconds"].append(world.seconds)
                if number in marks:
                    curve["memory_at"].append(number)
                    curve["memory"].append(kind.maker.memory() - before)
                bar.update()
    finally:
        for world in alive:
            world.end()
    return curve


def _show_curve(report: Report, label: str, curves: dict[str, dict[str, list[Any]]]) -> None:
    rows = []
    for name, curve in curves.items():
        seconds, worlds = curve["seconds"], curve["memory_at"][-1]
        edge = max(1, len(seconds) // 5)
        first, last = median(seconds[:edge]) * 1e3, median(seconds[-edge:]) * 1e3
        rows.append((name, len(seconds), first, last, curve["memory"][-1] / MIB / worlds if worlds else None))
    columns = ("", "worlds", "first fifth, p50 ms", "last fifth, p50 ms", "MiB per world")
    report.table(columns, rows, f"{label}, worlds made one after another and kept")


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--root", type=appworld_root, required=True, metavar="DIR", help="an AppWorld root")
    options.add_argument("--rows-root", type=appworld_root, metavar="DIR", help="one with data of realistic size")
    options.add_argument("--repeats", type=count, default=5, metavar="N", help="fresh processes (default: %(default)s)")
    options.add_argument(
        "--each", type=count, default=4, metavar="N", help="creates of the others for each (default: %(default)s)"
    )
    options.add_argument("--at-once", type=count, default=8, metavar="N", help="(default: %(default)s)")
    options.add_argument("--bursts", type=count, default=2, metavar="N", help="of so many (default: %(default)s)")
    options.add_argument("--steps", type=count, default=10, metavar="N", help="of a world (default: %(default)s)")
    options.add_argument("--code", default=API_CALLS, help="what a step runs (default: two API calls)")
    options.add_argument("--curve", type=count, metavar="N", help="make N worlds one after another, and keep them")
    options.add_argument("--curve-fresh", type=count, default=12, metavar="N", help="fresh ones (default: %(default)s)")
    options.add_argument("--plot", type=Path, metavar="FILE.png", help="plot that (N is 100 then); needs matplotlib")
    args = options.parse_args()
    args.curve = args.curve or (100 if args.plot else None)
    return args


if __name__ == "__main__":
    main()
