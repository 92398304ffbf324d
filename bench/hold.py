"""N live worlds held at once: create rate, memory per world, and how fast they answer while all are alive.

    python bench/hold.py 1000 --root DIR
    python bench/hold.py 200 --env echo

Starts a server of its own. Creates no more when the machine's memory runs low (--memory-stop), after --max-seconds, or
when one fails, and goes on with the worlds that there are: each answers --steps steps, all once before any again. Steps
take memory too, the first one most: when it runs low then, no more is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from dataclasses import dataclass, field

from common import (
    GIB,
    MIB,
    NO_OP,
    Report,
    appworld_root,
    count,
    end_on_sigterm,
    fenced,
    latencies,
    median,
    memory_available,
    parser,
    progress,
)
from player import CallFailed, Player
from processes import Served, private, pss, raise_open_files, serving, tree
from rawhttp import AsyncClient

FILES_PER_WORLD = 8  # that the server has open, at most
SAMPLE = 100  # worlds whose private memory is read


@dataclass
class Held:
    """What was found on the way up, at the top, and on the way down."""

    instances: list[str] = field(default_factory=list)
    stopped: str = ""
    create_seconds: float = 0.0
    step_seconds: float = 0.0
    release_seconds: float = 0.0
    pss_before: int = 0
    pss_held: int = 0
    pss_after: int = 0
    private: list[int] = field(default_factory=list)
    private_after: list[int] = field(default_factory=list)


def main() -> None:
    args = _options()
    end_on_sigterm()
    report = Report("hold")
    files = raise_open_files(args.worlds * FILES_PER_WORLD + 1000)
    if files < args.worlds * FILES_PER_WORLD:
        report.say(f"only {files} open files are allowed here, which may be too few")
    options = ["--env", args.env, "--max-instances", str(args.worlds), "--idle-ttl", "86400"]
    options += ["--root", str(args.root)] if args.root else []
    with serving(*options) as served:
        player, held = asyncio.run(_run(args, served))
    _show(report, args, player, held)
    report.write(args.json)
    if player.errors:
        raise SystemExit(1)


async def _run(args: argparse.Namespace, served: Served) -> tuple[Player, Held]:
    client = AsyncClient(served.url)
    player = Player(client, args.env)
    held = Held()
    try:
        await _create(args, player, served, held)
        held.pss_held, held.private = _measure(served, held)
        await _step(args, player, held)
        held.pss_after, held.private_after = _measure(served, held)
        await _release(args, player, held)
    except CallFailed as error:
        held.stopped = held.stopped or str(error)
    finally:
        client.close()
    return player, held


async def _create(args: argparse.Namespace, player: Player, served: Served, held: Held) -> None:
    tasks = await player.task_ids(args.split)
    tasks = tasks[: args.tasks]
    each = -(-args.worlds // len(tasks))
    held.pss_before = pss(tree(served.pid))
    began = time.perf_counter()
    numbers = iter(range(args.worlds))
    with progress(args.worlds, "world", "create") as bar:

        async def work() -> None:
            for number in numbers:
                if time.perf_counter() - began > args.max_seconds:
                    held.stopped = held.stopped or "--max-seconds"
                if _memory_is_low(args, held) or held.stopped:
                    return
                try:
                    held.instances.append(await player.create(tasks[number // each]))
                except CallFailed as error:
                    held.stopped = held.stopped or str(error)
                bar.update()

        await asyncio.gather(*(work() for _ in range(args.concurrency)))
    held.create_seconds = time.perf_counter() - began


def _memory_is_low(args: argparse.Namespace, held: Held) -> bool:
    available = memory_available() / GIB
    if available >= args.memory_stop:
        return False
    held.stopped = held.stopped or f"{available:.1f} GiB of memory are left, below --memory-stop"
    return True


def _measure(served: Served, held: Held) -> tuple[int, list[int]]:
    """The PSS of all, and the private memory of some worlds."""
    pids = tree(served.pid)
    with progress(len(pids), "process", "memory") as bar:
        whole = pss(pids, bar.update)
    worlds = pids[-len(held.instances) :]  # the youngest generation: groups and templates come before
    return whole, [private(pid) for pid in worlds[:: max(1, len(worlds) // SAMPLE)]]


async def _step(args: argparse.Namespace, player: Player, held: Held) -> None:
    """Each world answers before any is asked again."""
    message = fenced(args.code) if args.env == "appworld" else {"role": "assistant", "content": "hello"}
    began = time.perf_counter()
    with progress(args.steps * len(held.instances), "step", "step") as bar:
        turns = iter([instance_id for _ in range(args.steps) for instance_id in held.instances])

        async def work() -> None:
            for instance_id in turns:
                if _memory_is_low(args, held):
                    return
                await player.step(instance_id, message)
                bar.update()

        await asyncio.gather(*(work() for _ in range(args.concurrency)))
    held.step_seconds = time.perf_counter() - began


async def _release(args: argparse.Namespace, player: Player, held: Held) -> None:
    began = time.perf_counter()
    with progress(len(held.instances), "world", "release") as bar:
        instances = iter(held.instances)

        async def work() -> None:
            for instance_id in instances:
                await player.release(instance_id)
                bar.update()

        await asyncio.gather(*(work() for _ in range(args.concurrency)))
    held.release_seconds = time.perf_counter() - began


def _show(report: Report, args: argparse.Namespace, player: Player, held: Held) -> None:
    worlds = len(held.instances)
    if held.stopped:
        report.say(f"STOPPED EARLY, with {worlds} of {args.worlds} worlds: {held.stopped}")
    steps = player.seconds["step"]
    calls = {
        "create": latencies(player.seconds["create"]),
        "first step": latencies(steps[:worlds]),
        "later steps": latencies(steps[worlds:]),
        "release": latencies(player.seconds["release"]),
    }
    seconds = {"create": held.create_seconds, "step": held.step_seconds, "release": held.release_seconds}
    rates = {route: len(player.seconds[route]) / spent if spent else None for route, spent in seconds.items()}
    report.table(
        ("", "calls", "p50 ms", "p95 ms", "max ms"),
        [(name, *figures.values()) for name, figures in calls.items()],
        f"{worlds} worlds held, {args.concurrency} calls at a time",
    )
    report.say(", ".join(f"{rate:.1f} {route}s/s" for route, rate in rates.items() if rate is not None))
    memory = {
        "held": _memory(held.pss_held, held.private, held, worlds),
        "after the steps": _memory(held.pss_after, held.private_after, held, worlds),
    }
    report.table(
        ("memory, MiB", "all (PSS)", "all / worlds", "(all - before) / worlds", "private of a world, p50"),
        [("before", held.pss_before / MIB, None, None, None), *((when, *one.values()) for when, one in memory.items())],
    )
    for what, times in player.errors.most_common(10):
        report.say(f"{times} times {what}")
    report.results = {
        "wanted": args.worlds,
        "held": worlds,
        "stopped": held.stopped or None,
        "calls": calls,
        "per_second": rates,
        "memory_before_mib": held.pss_before / MIB,
        "memory": memory,
        "errors": dict(player.errors),
    }


def _memory(whole: int, privates: list[int], held: Held, worlds: int) -> dict[str, float]:
    """In MiB; nan where it was not measured, or there is no world."""
    if not whole or not worlds:
        return dict.fromkeys(("all", "per_world", "added_per_world", "private_p50"), math.nan)
    return {
        "all": whole / MIB,
        "per_world": whole / MIB / worlds,
        "added_per_world": (whole - held.pss_before) / MIB / worlds,
        "private_p50": median(privates) / MIB,
    }


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("worlds", type=count, metavar="N")
    options.add_argument("--env", default="appworld", help="(default: %(default)s)")
    options.add_argument("--root", type=appworld_root, metavar="DIR", help="AppWorld's root")
    options.add_argument("--split", default="train", help="(default: %(default)s)")
    options.add_argument("--tasks", type=count, default=8, metavar="N", help="that they share (default: %(default)s)")
    options.add_argument("--steps", type=count, default=3, metavar="N", help="of each world (default: %(default)s)")
    options.add_argument("--code", default=NO_OP, help="what a step runs in AppWorld (default: %(default)s)")
    options.add_argument("--concurrency", type=count, default=8, metavar="N", help="(default: %(default)s)")
    options.add_argument(
        "--memory-stop", type=float, default=2.0, metavar="GIB", help="stop when less is left (default: %(default)g)"
    )
    options.add_argument("--max-seconds", type=float, default=600.0, metavar="S", help="(default: %(default)g)")
    args = options.parse_args()
    if args.env == "appworld" and args.root is None:
        options.error("--env appworld needs --root")
    return args


if __name__ == "__main__":
    main()
