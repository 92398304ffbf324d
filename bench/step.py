"""A step over HTTP against the same `execute` and `task_completed` on AppWorld's own engine, in process.

    python bench/step.py --root DIR --episodes 3 --steps 100

The stock engine runs in a process of its own and times itself there, so nothing is added to its figure; the service's
is what a client sees. They take turns, step by step, on the same task. Bounded by --max-seconds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import NO_OP, Report, appworld_root, count, end_on_sigterm, fenced, median, parser, percentile, progress
from common import task_ids as tasks_of
from processes import serving
from rawhttp import BlockingClient
from stock import Stock

SIDES = ("http", "stock")
Times = dict[str, list[float]]


def main() -> None:
    args = _options()
    end_on_sigterm()
    report = Report("step")
    task_id = args.task or tasks_of(args.root)[0]
    episodes: list[Times] = []
    end = time.perf_counter() + args.max_seconds
    with (
        Stock(args.root, task_id) as stock,
        serving("--env", "appworld", "--root", str(args.root)) as served,
        BlockingClient(served.url) as client,
        progress(args.episodes * args.steps, "step") as bar,
    ):
        stock.ready()
        _episode(client, stock, task_id, args.code, 3)  # both sides do things for the first time once
        for _ in range(args.episodes):
            if time.perf_counter() > end:
                report.say(f"stopped after {len(episodes)} episodes: --max-seconds")
                break
            episodes.append(_episode(client, stock, task_id, args.code, args.steps, bar))
    _show(report, episodes, args)
    report.results["task"], report.results["code"] = task_id, args.code
    report.write(args.json)


def _episode(client: BlockingClient, stock: Stock, task_id: str, code: str, steps: int, bar: Any = None) -> Times:
    """New worlds on both sides; the seconds of each step."""
    instance_id = client.call("create", env_type="appworld", task_id=task_id)["info"]["instance_id"]
    stock.call("new", task_id=task_id)
    body = {"env_type": "default", "instance_id": instance_id, "messages": fenced(code), "params": {}}
    request = client.request("step", body)
    times: Times = {side: [] for side in SIDES}

    def over_http() -> None:
        began = time.perf_counter()
        status, reply = client.exchange(request)
        times["http"].append(time.perf_counter() - began)
        if status != 200:
            raise SystemExit(f"a step was answered {status}: {reply[:300]!r}")

    def in_process() -> None:
        times["stock"].append(stock.call("step", code=code)["seconds"])

    for number in range(steps):
        for turn in (over_http, in_process) if number % 2 == 0 else (in_process, over_http):
            turn()
        if bar is not None:
            bar.update()
    client.call("release", instance_id=instance_id)
    return times


def _show(report: Report, episodes: list[Times], args: argparse.Namespace) -> None:
    edge = min(args.edge, args.steps // 2 or 1)
    rows: list[tuple[Any, ...]] = []
    found = []
    for number, times in enumerate(episodes, 1):
        entry = _compare([times], edge)
        found.append(entry)
        rows += _rows(str(number), entry)
    total = _compare(episodes, edge)
    rows += _rows("all", total)
    columns = ("episode", "side", "p50 ms", "p95 ms", f"first {edge}, p50 ms", f"last {edge}, p50 ms", "last/first")
    report.table(columns, rows, f"steps of {args.code!r}")
    report.say(
        f"a step over HTTP takes {total['ratio']:.2f} times what it takes the stock engine in process, at the median;"
        f" the last {edge} of {args.steps} take {total['http']['flatness']:.2f} times the first {edge}"
        f" (stock engine: {total['stock']['flatness']:.2f})"
    )
    report.results |= {"episodes": found, "all": total, "seconds": episodes}


def _compare(episodes: list[Times], edge: int) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for side in SIDES:
        every = [seconds for times in episodes for seconds in times[side]]
        first = median(seconds for times in episodes for seconds in times[side][:edge])
        last = median(seconds for times in episodes for seconds in times[side][-edge:])
        entry[side] = {
            "p50_ms": median(every) * 1e3,
            "p95_ms": percentile(every, 0.95) * 1e3,
            "first_ms": first * 1e3,
            "last_ms": last * 1e3,
            "flatness": last / first,
        }
    entry["ratio"] = entry["http"]["p50_ms"] / entry["stock"]["p50_ms"]
    entry["ratio_p95"] = entry["http"]["p95_ms"] / entry["stock"]["p95_ms"]
    return entry


def _rows(label: str, entry: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (label, "service, over HTTP", *entry["http"].values()),
        (label, "stock, in process", *entry["stock"].values()),
        (label, "  ratio", entry["ratio"], entry["ratio_p95"], None, None, None),
    ]


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--root", type=appworld_root, required=True, metavar="DIR", help="AppWorld's root")
    options.add_argument("--task", metavar="ID", help="(default: the first one of the root)")
    options.add_argument("--episodes", type=count, default=5, metavar="N", help="(default: %(default)s)")
    options.add_argument("--steps", type=count, default=100, metavar="N", help="in an episode (default: %(default)s)")
    options.add_argument("--edge", type=count, default=20, metavar="N", help="how many are the first and the last")
    options.add_argument("--code", default=NO_OP, help="what a step runs (default: %(default)s)")
    options.add_argument("--max-seconds", type=float, default=300.0, metavar="S", help="(default: %(default)g)")
    return options.parse_args()


if __name__ == "__main__":
    main()
