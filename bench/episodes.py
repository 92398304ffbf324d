"""Whole episodes (create, steps, evaluate, release) against the same in fresh processes with AppWorld's own engine.

    python bench/episodes.py --root DIR --episodes 16 --concurrency 4

The two take turns; each round plays other tasks, so the service has no template of a task's group before it. Its start
is not counted, as it is one for a whole training run. A round takes about 3 s for each episode in a fresh process.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import NO_OP, Report, appworld_root, count, end_on_sigterm, fenced, median, parser, progress
from common import task_ids as tasks_of
from player import Player
from processes import serving
from rawhttp import AsyncClient
from stock import Stock, warm_up


def main() -> None:
    args = _options()
    end_on_sigterm()
    report = Report("episodes")
    tasks = tasks_of(args.root)
    groups = -(-args.episodes // args.group)
    rounds: list[dict[str, float]] = []
    warm_up(args.root, tasks[0])
    with (
        serving("--env", "appworld", "--root", str(args.root)) as served,
        progress(args.rounds * args.episodes * 2, "episode") as bar,
    ):
        for number in range(args.rounds):
            begin = number * groups
            chosen = [tasks[(begin + episode // args.group) % len(tasks)] for episode in range(args.episodes)]
            service = asyncio.run(_over_http(served.url, chosen, args, bar))
            fresh = _in_fresh_processes(args.root, chosen, args, bar)
            rounds.append({"service_seconds": service, "fresh_seconds": fresh, "ratio": fresh / service})
    report.table(
        ("round", "service, s", "episodes/s", "fresh processes, s", "episodes/s", "ratio"),
        [
            (
                str(number),
                one["service_seconds"],
                args.episodes / one["service_seconds"],
                one["fresh_seconds"],
                args.episodes / one["fresh_seconds"],
                one["ratio"],
            )
            for number, one in enumerate(rounds, 1)
        ],
        f"{args.episodes} episodes of {args.steps} steps, {args.concurrency} at a time, {args.group} of a task",
    )
    ratio = median(one["ratio"] for one in rounds)
    report.say(f"{ratio:.1f} times the episodes/s of fresh processes")
    report.results = {
        "episodes": args.episodes,
        "service_episodes_per_second": median(args.episodes / one["service_seconds"] for one in rounds),
        "fresh_episodes_per_second": median(args.episodes / one["fresh_seconds"] for one in rounds),
        "ratio": ratio,
        "rounds": rounds,
    }
    report.write(args.json)


async def _over_http(url: str, tasks: list[str], args: argparse.Namespace, bar: Any) -> float:
    client = AsyncClient(url)
    player = Player(client, "appworld")
    limit = asyncio.Semaphore(args.concurrency)

    async def play(task_id: str) -> None:
        async with limit:
            if not await player.finish(await player.create(task_id), fenced(args.code), args.steps):
                raise SystemExit(f"an episode failed: {player.errors}")
            bar.update()

    began = time.perf_counter()
    await asyncio.gather(*(play(task_id) for task_id in tasks))
    took = time.perf_counter() - began
    client.close()
    return took


def _in_fresh_processes(root: Path, tasks: list[str], args: argparse.Namespace, bar: Any) -> float:
    def play(task_id: str) -> None:
        with Stock(root, task_id) as stock:
            stock.ready()
            for _ in range(args.steps):
                stock.call("step", code=args.code)
            stock.call("evaluate")
        bar.update()

    began = time.perf_counter()
    with ThreadPoolExecutor(args.concurrency) as threads:
        list(threads.map(play, tasks))
    return time.perf_counter() - began


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--root", type=appworld_root, required=True, metavar="DIR", help="AppWorld's root")
    options.add_argument("--episodes", type=count, default=16, metavar="N", help="in a round (default: %(default)s)")
    options.add_argument("--concurrency", type=count, default=4, metavar="N", help="(default: %(default)s)")
    options.add_argument("--steps", type=count, default=10, metavar="N", help="in an episode (default: %(default)s)")
    options.add_argument(
        "--group", type=count, default=8, metavar="N", help="episodes of a task (default: %(default)s)"
    )
    options.add_argument("--rounds", type=count, default=3, metavar="N", help="(default: %(default)s)")
    options.add_argument("--code", default=NO_OP, help="what a step runs (default: %(default)s)")
    return options.parse_args()


if __name__ == "__main__":
    main()
