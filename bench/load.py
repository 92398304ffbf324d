"""Play episodes against a server that runs already: latency by route, rates, errors, and memory per instance.

    python bench/load.py http://127.0.0.1:8080 --episodes 64 --concurrency 16 --pid PID

Works against any server that speaks the protocol. An episode is create, some steps, evaluate, release. First as many
instances are created as may live at once; with the server's pid, memory is measured then, when all are alive.
It ends after --max-seconds at the latest: episodes that run then are finished, no new one is begun.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from dataclasses import dataclass
from typing import Any

from common import MIB, NO_OP, Report, count, end_on_sigterm, fenced, latencies, parser, progress
from player import CallFailed, Player
from processes import pss, tree
from rawhttp import AsyncClient

ROUTES = ("get_env_profile", "create", "step", "evaluate", "release")


@dataclass
class Outcome:
    """What the run showed. `seconds` is without the time that measuring memory took."""

    finished: int = 0
    failed: int = 0
    seconds: float = 0.0
    alive: int = 0
    memory_before: int = 0
    memory_alive: int = 0


def main() -> None:
    args = _options()
    end_on_sigterm()
    report = Report("load")
    player, outcome = asyncio.run(_run(args))
    _show(report, player, outcome)
    report.write(args.json)
    if player.errors:
        raise SystemExit(1)


async def _run(args: argparse.Namespace) -> tuple[Player, Outcome]:
    client = AsyncClient(args.url, args.call_timeout)
    player = Player(client, args.env)
    try:
        tasks = await player.task_ids(args.split)
        if not tasks:
            raise SystemExit(f"split {args.split!r} has no tasks")
        return player, await _play(player, tasks, args)
    except CallFailed as error:
        raise SystemExit(f"{args.url}: {error}") from None
    finally:
        client.close()


async def _play(player: Player, tasks: list[str], args: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    numbers = iter(range(args.episodes))
    before = set(tree(args.pid)) if args.pid else set()
    outcome.memory_before = pss(before)
    began = time.perf_counter()
    with progress(args.episodes, "episode") as bar:

        async def create(number: int) -> str | None:
            try:
                return await player.create(tasks[number // args.group % len(tasks)], args.params)
            except CallFailed:
                outcome.failed += 1
                bar.update()
                return None

        async def work(instance_id: str | None) -> None:
            while True:
                if instance_id is not None:
                    good = await player.finish(instance_id, args.action, args.steps)
                    outcome.finished += good
                    outcome.failed += not good
                    bar.update()
                number = next(numbers, None)
                if number is None or time.perf_counter() - began > args.max_seconds:
                    return
                instance_id = await create(number)

        first = [next(numbers) for _ in range(min(args.concurrency, args.episodes))]
        instances = await asyncio.gather(*(create(number) for number in first))
        outcome.alive = sum(instance is not None for instance in instances)
        paused = time.perf_counter()
        if args.pid:
            outcome.memory_alive = pss(tree(args.pid))
        pause = time.perf_counter() - paused
        await asyncio.gather(*(work(instance) for instance in instances))
    outcome.seconds = time.perf_counter() - began - pause
    return outcome


def _show(report: Report, player: Player, outcome: Outcome) -> None:
    routes = {route: latencies(player.seconds[route]) for route in ROUTES}
    steps = len(player.seconds["step"])
    report.table(
        ("route", "calls", "p50 ms", "p95 ms", "max ms"),
        [(f"/{route}", *summary.values()) for route, summary in routes.items()],
    )
    rates = {"episodes_per_second": outcome.finished / outcome.seconds, "steps_per_second": steps / outcome.seconds}
    memory = _memory(outcome)
    report.table(
        ("", ""),
        [
            ("episodes", outcome.finished),
            ("failed", outcome.failed),
            ("seconds", outcome.seconds),
            ("episodes/s", rates["episodes_per_second"]),
            ("steps/s", rates["steps_per_second"]),
            *((label, value) for label, value in memory.items() if value is not None),
        ],
    )
    for what, times in player.errors.most_common(10):
        report.say(f"{times} times {what}")
    report.results = {
        "routes": routes,
        "episodes": outcome.finished,
        "failed": outcome.failed,
        "seconds": outcome.seconds,
        **rates,
        "errors": dict(player.errors),
        "memory": memory,
    }


def _memory(outcome: Outcome) -> dict[str, Any]:
    """Of the server's process tree. Empty where no pid was given."""
    if not outcome.memory_alive:
        return {}
    alive, before, after = outcome.alive, outcome.memory_before / MIB, outcome.memory_alive / MIB
    return {
        "instances alive": alive,
        "MiB before the first": before,
        "MiB when all are alive": after,
        "MiB per instance": after / alive if alive else math.nan,
        "MiB per instance, without what was there before": (after - before) / alive if alive else math.nan,
    }


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("url", metavar="URL")
    options.add_argument("--env", default="appworld", help="(default: %(default)s)")
    options.add_argument("--split", default="train", help="(default: %(default)s)")
    options.add_argument("--episodes", type=count, default=32, metavar="N", help="(default: %(default)s)")
    options.add_argument("--concurrency", type=count, default=8, metavar="N", help="(default: %(default)s)")
    options.add_argument("--steps", type=count, default=10, metavar="N", help="in an episode (default: %(default)s)")
    options.add_argument(
        "--group", type=count, default=8, metavar="N", help="episodes in a row on one task (default: %(default)s)"
    )
    options.add_argument(
        "--action", metavar="TEXT", help="what each step says (default: for appworld a block that does nothing)"
    )
    options.add_argument(
        "--params", type=_object, default={}, metavar="JSON", help="the creates' params, a JSON object"
    )
    options.add_argument("--pid", type=count, help="the server's process, to measure memory")
    options.add_argument("--call-timeout", type=float, default=300.0, metavar="S", help="(default: %(default)g)")
    options.add_argument("--max-seconds", type=float, default=600.0, metavar="S", help="(default: %(default)g)")
    args = options.parse_args()
    no_op = fenced(NO_OP)["content"] if args.env == "appworld" else "hello"
    args.action = {"role": "assistant", "content": no_op if args.action is None else args.action}
    return args


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


if __name__ == "__main__":
    main()
