"""What the service adds to a step: its echo env against a bare aiohttp handler with the same bodies.

    python bench/overhead.py --connections 1,32 --rounds 5 --seconds 3

Both are servers of their own, on the same kind of event loop. This process sends, to one of them at a time, in turns:
each connection has an instance of its own and sends its next step when the reply to the last is there. Both read the
request and make the reply by orjson; the service also passes it on to the instance's process and back. Takes about
twice rounds times seconds for each number of connections.
"""

from __future__ import annotations

import argparse
import gc
import json
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import Report, count, end_on_sigterm, median, parser, percentile, progress
from processes import Served, cpu_seconds, serving, started, tree, uses_uvloop
from rawhttp import BadReply, BlockingClient, post, split_reply

BARE = Path(__file__).with_name("bare.py")
SIDES = ("echo env", "bare aiohttp")
WARM_UP = 0.3  # seconds


@dataclass
class Side:
    """One of the two servers, and what was measured of it at one number of connections: an item for each round."""

    server: Served
    requests: list[bytes]
    rates: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p95: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)
    tree_cpu: list[float] = field(default_factory=list)

    def measure(self, seconds: float) -> None:
        pids = tree(self.server.pid)
        before, before_all = cpu_seconds([self.server.pid]), cpu_seconds(pids)
        took, latencies = hammer(self.server.port, self.requests, seconds)
        self.rates.append(len(latencies) / took)
        self.p50.append(median(latencies) * 1e6)
        self.p95.append(percentile(latencies, 0.95) * 1e6)
        self.server_cpu.append((cpu_seconds([self.server.pid]) - before) / len(latencies) * 1e6)
        self.tree_cpu.append((cpu_seconds(pids) - before_all) / len(latencies) * 1e6)

    def summary(self) -> dict[str, float]:
        """Medians over the rounds."""
        return {
            "requests_per_second": median(self.rates),
            "p50_us": median(self.p50),
            "p95_us": median(self.p95),
            "server_cpu_us": median(self.server_cpu),
            "tree_cpu_us": median(self.tree_cpu),
        }


def hammer(port: int, requests: list[bytes], seconds: float) -> tuple[float, list[float]]:
    """Send each request over a connection of its own, again and again; the time it took, and each reply's latency."""
    poll = select.epoll()
    sockets: dict[int, socket.socket] = {}
    request_of: dict[int, bytes] = {}
    sent_at: dict[int, float] = {}
    parts: dict[int, bytes] = {}
    latencies: list[float] = []
    clock = time.perf_counter
    gc.collect()
    gc.disable()
    try:
        for request in requests:
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number = connection.fileno()
            sockets[number], request_of[number], parts[number] = connection, request, b""
            poll.register(number, select.EPOLLIN)
        began = clock()
        end = began + seconds
        for number, connection in sockets.items():
            sent_at[number] = clock()
            connection.sendall(request_of[number])
        while (now := clock()) < end:
            events = poll.poll(30)
            if not events:
                raise BadReply("no reply within 30 s")
            for number, _ in events:
                connection = sockets[number]
                data = parts[number] + connection.recv(262144)
                reply = split_reply(data)
                if reply is None:
                    if data == parts[number]:
                        raise BadReply("the server closed a connection")
                    parts[number] = data
                    continue
                now = clock()
                if reply[0] != 200:
                    raise BadReply(f"{reply[0]}: {reply[1][:300]!r}")
                parts[number] = b""
                latencies.append(now - sent_at[number])
                sent_at[number] = now
                connection.sendall(request_of[number])
        # The replies under way are waited for: the next step must not find its instance busy.
        for number, connection in sockets.items():
            data = parts[number]
            while split_reply(data) is None:
                data += (more := connection.recv(262144))
                if not more:
                    raise BadReply("the server closed a connection")
        return now - began, latencies
    finally:
        gc.enable()
        poll.close()
        for connection in sockets.values():
            connection.close()


def main() -> None:
    args = _options()
    end_on_sigterm()
    report = Report("overhead")
    most = max(args.connections)
    with serving("--env", "echo", "--max-instances", str(most + 1)) as echo, BlockingClient(echo.url) as client:
        created = [client.call("create", env_type="echo", task_id="train-1") for _ in range(most)]
        message = {"role": "assistant", "content": "x" * args.size}
        bodies = [
            {"env_type": "default", "instance_id": one["info"]["instance_id"], "messages": message, "params": {}}
            for one in created
        ]
        status, reply = client.exchange(client.request("step", bodies[0]))
        if status != 200:
            raise SystemExit(f"the first step was answered {status}: {reply!r}")
        requests = [post("127.0.0.1", "step", json.dumps(body).encode()) for body in bodies]
        loop = "uvloop" if uses_uvloop(echo.pid) else "asyncio"
        with started([sys.executable, str(BARE), loop, reply.decode()]) as bare:
            report.say(f"{loop} on both sides; bodies of about {len(requests[0])} and {len(reply)} bytes")
            report.results["loop"] = loop
            report.results["connections"] = _measure(report, args, (echo, bare), requests)
    report.write(args.json)


def _measure(
    report: Report, args: argparse.Namespace, servers: tuple[Served, Served], requests: list[bytes]
) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    rows: list[tuple[object, ...]] = []
    with progress(len(args.connections) * args.rounds * 2, "measurement") as bar:
        for connections in args.connections:
            sides = [Side(server, requests[:connections]) for server in servers]
            for side in sides:
                hammer(side.server.port, side.requests, min(WARM_UP, args.seconds))
            for number in range(args.rounds):
                for side in sides if number % 2 == 0 else sides[::-1]:
                    side.measure(args.seconds)
                    bar.update()
            echo, bare = sides
            ratio = median(mine / its for mine, its in zip(echo.rates, bare.rates, strict=True))
            slower = median(mine / its for mine, its in zip(echo.p50, bare.p50, strict=True))
            rows += [(name, connections, *side.summary().values()) for name, side in zip(SIDES, sides, strict=True)]
            rows.append(("  ratio", connections, ratio, slower, None, None, None))
            found[str(connections)] = {
                **{name: side.summary() for name, side in zip(("echo", "bare"), sides, strict=True)},
                "rate_ratio": ratio,
                "latency_ratio": slower,
            }
    columns = ("", "connections", "requests/s", "p50 us", "p95 us", "CPU us/request, server", "and its worlds")
    report.table(columns, rows)
    for connections, entry in found.items():
        report.say(
            f"at {connections} connections: {entry['rate_ratio']:.0%} of the requests/s,"
            f" {entry['latency_ratio']:.2f} times the latency of the bare handler"
        )
    return found


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--connections",
        type=lambda text: [count(part) for part in text.split(",")],
        default=[1, 32],
        metavar="N,…",
        help="(default: 1,32)",
    )
    options.add_argument("--rounds", type=count, default=5, metavar="N", help="(default: %(default)s)")
    options.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of one turn (default: %(default)g)")
    options.add_argument(
        "--size", type=count, default=100, metavar="N", help="letters in a message (default: %(default)s)"
    )
    return options.parse_args()


if __name__ == "__main__":
    main()
