"""The time from asking for a branch of a live AppWorld world to its first answered step, beside a create, in one run.

    python bench/branch.py --root REALISTIC

- branch: a copy of a world that has taken --steps, and one step of it
- create: a new world of the same task from its group template, and one step of it

They take turns, alone and --at-once: one fork of so many, or so many creates, and a step of each once it is there.
Private memory is what would be free if the world's process ended, after that step. The target is a branch within 40 ms
and 25 MiB, on 2 cores that have nothing else to do; on others look at the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from common import (
    API_CALLS,
    MIB,
    NO_OP,
    Report,
    appworld_root,
    count,
    end_on_sigterm,
    fenced,
    median,
    parser,
    percentile,
    progress,
)
from common import task_ids as tasks_of
from processes import Served, private, serving, tree
from rawhttp import BlockingClient

TARGET_MS, TARGET_MIB = 40.0, 25.0


@dataclass
class Found:
    """Of one way to make worlds; times in seconds, memory in bytes."""

    alone: list[float] = field(default_factory=list)
    at_once: list[float] = field(default_factory=list)
    private: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        return {
            "worlds": len(self.alone),
            "p50_ms": median(self.alone) * 1e3,
            "p95_ms": percentile(self.alone, 0.95) * 1e3,
            "at_once_p50_ms": median(self.at_once) * 1e3,
            "at_once_max_ms": max(self.at_once) * 1e3,
            "private_mib": median(self.private) / MIB,
        }


class Bench:
    """A server with one world that has taken some steps, which branches are made of."""

    def __init__(self, served: Served, clients: Sequence[BlockingClient], task_id: str, args: argparse.Namespace):
        self._pid = served.pid
        self._clients = clients
        self._task_id = task_id
        self._code = args.code
        self._source = self._create(clients[0])
        for _ in range(args.steps):
            self._step(clients[0], self._source, args.source_code)

    def alone(self, found: Found, branch: bool) -> None:
        client, before = self._clients[0], set(tree(self._pid))
        began = time.perf_counter()
        world = self._fork(1)[0] if branch else self._create(client)
        self._step(client, world, self._code)
        found.alone.append(time.perf_counter() - began)
        found.private += [private(pid) for pid in set(tree(self._pid)) - before]
        client.call("release", instance_id=world)

    def at_once(self, found: Found, branch: bool) -> None:
        """The time of each world is from the beginning to its own first answer."""
        began = time.perf_counter()
        forked = self._fork(len(self._clients)) if branch else [""] * len(self._clients)

        def first_step(client: BlockingClient, world: str) -> tuple[str, float]:
            world = world or self._create(client)
            self._step(client, world, self._code)
            return world, time.perf_counter() - began

        with ThreadPoolExecutor(len(self._clients)) as threads:
            made = list(threads.map(first_step, self._clients, forked))
        for world, seconds in made:
            found.at_once.append(seconds)
            self._clients[0].call("release", instance_id=world)

    def _create(self, client: BlockingClient) -> str:
        return str(client.call("create", env_type="appworld", task_id=self._task_id)["info"]["instance_id"])

    def _fork(self, number: int) -> list[str]:
        made = self._clients[0].call("fork", instance_id=self._source, params={"n": number})
        return [branch["instance_id"] for branch in made]

    def _step(self, client: BlockingClient, world: str, code: str) -> None:
        client.call("step", instance_id=world, messages=fenced(code))


def main() -> None:
    args = _options()
    end_on_sigterm()
    report = Report("branch")
    found = {"branch": Found(), "create": Found()}
    with (
        serving("--env", "appworld", "--root", str(args.root)) as served,
        contextlib.ExitStack() as stack,
        progress(args.repeats + args.bursts, "turn") as bar,
    ):
        clients = [stack.enter_context(BlockingClient(served.url)) for _ in range(args.at_once)]
        bench = Bench(served, clients, args.task or tasks_of(args.root)[0], args)
        for name in found:
            bench.alone(Found(), name == "branch")  # what is done once is behind them
        for number in range(args.repeats + args.bursts):
            for name in sorted(found, reverse=bool(number % 2)):
                turn = bench.alone if number < args.repeats else bench.at_once
                turn(found[name], name == "branch")
            bar.update()
    _show(report, {name: one.summary() for name, one in found.items()}, args)
    report.write(args.json)


def _show(report: Report, found: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    branch, create = found["branch"], found["create"]
    ratios: dict[str, Any] = {key: branch[key] / create[key] for key in branch if key != "worlds"}
    times = ("worlds", "p50 ms", "p95 ms", f"{args.at_once} at once, p50 ms", "max ms", "private MiB")
    rows = [*((name, *one.values()) for name, one in found.items()), ("  ratio", None, *ratios.values())]
    report.table(("to the first answered step", *times), rows, f"branches of a world that has taken {args.steps} steps")
    report.say(
        f"a branch takes {branch['p50_ms'] / TARGET_MS:.2f} of the target of {TARGET_MS:g} ms at the median,"
        f" and {branch['private_mib'] / TARGET_MIB:.2f} of that of {TARGET_MIB:g} MiB;"
        f" {args.at_once} at once take {branch['at_once_max_ms'] / args.at_once:.1f} ms each"
    )
    report.results |= {"kinds": found, "ratios": ratios, "target": {"ms": TARGET_MS, "mib": TARGET_MIB}}


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--root", type=appworld_root, required=True, metavar="DIR", help="an AppWorld root")
    options.add_argument("--task", metavar="ID", help="(default: the first one of the root)")
    options.add_argument("--repeats", type=count, default=40, metavar="N", help="of each alone (default: %(default)s)")
    options.add_argument("--at-once", type=count, default=8, metavar="N", help="(default: %(default)s)")
    options.add_argument("--bursts", type=count, default=5, metavar="N", help="of so many (default: %(default)s)")
    options.add_argument("--steps", type=count, default=10, metavar="N", help="of the source (default: %(default)s)")
    options.add_argument("--source-code", default=API_CALLS, help="what these run (default: two API calls)")
    options.add_argument("--code", default=NO_OP, help="what the first step runs (default: %(default)s)")
    return options.parse_args()


if __name__ == "__main__":
    main()
