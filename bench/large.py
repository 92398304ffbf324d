"""How long others wait while large bodies pass: the health route, and small steps, beside steps of many MB.

    python bench/large.py --mb 30 --senders 2 --seconds 20

A server of its own with its echo env, where each large step's action comes back as its observation. The large steps
are sent by processes of their own; this one asks the health route, then takes a small step on an instance of its own,
and again, first while nothing else goes on and then beside them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from common import Report, count, end_on_sigterm, median, parser, percentile
from processes import serving
from rawhttp import BlockingClient, address, post

PAUSE = 0.005  # seconds between two looks
GET = b"GET /healthz HTTP/1.1\r\nHost: bench\r\n\r\n"


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument(
        "--mb", type=count, default=30, metavar="N", help="size of a large body (default: %(default)s)"
    )
    options.add_argument("--senders", type=count, default=1, metavar="N", help="at once (default: %(default)s)")
    options.add_argument("--seconds", type=float, default=15.0, help="of each part (default: %(default)g)")
    options.add_argument("--send", nargs=2, metavar=("URL", "ID"), help="be a sender: used by the script itself")
    args = options.parse_args(argv)
    if args.send:
        send(*args.send, args.mb, args.seconds)
        return 0
    end_on_sigterm()
    report = Report("large")
    with serving("--env", "echo") as server, BlockingClient(server.url) as client:
        client.call("create", task_id="t", instance_id="small")
        for number in range(args.senders):
            client.call("create", task_id="t", instance_id=f"large-{number}")
        alone = look(client, server.url, args.seconds)
        command = [sys.executable, __file__, "--mb", str(args.mb), "--seconds", str(args.seconds)]
        senders = [
            subprocess.Popen([*command, "--send", server.url, f"large-{number}"], stdout=subprocess.PIPE, text=True)
            for number in range(args.senders)
        ]
        try:
            beside = look(client, server.url, args.seconds)
            sent = sum(int(sender.communicate(timeout=300)[0]) for sender in senders)
        finally:
            for sender in senders:
                sender.kill()
                sender.wait()
    report.results = {"alone": alone, "beside": beside, "large_steps": sent, "mb": args.mb, "senders": args.senders}
    rows = [
        (f"{what}, {when}", *figures[what].values())
        for what in ("health", "small step")
        for when, figures in (("alone", alone), (f"beside {args.senders} of {args.mb} MB", beside))
    ]
    report.table(("", *alone["health"]), rows)
    report.say(f"\n{sent} large steps passed meanwhile")
    report.write(args.json)
    return 0


def look(client: BlockingClient, url: str, seconds: float) -> dict[str, dict[str, float]]:
    """Health checks and small steps in turns; their latencies."""
    step = post(address(url)[0], "step", b'{"instance_id": "small", "messages": {"content": "x"}}')
    took: dict[str, list[float]] = {"health": [], "small step": []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for what, request in (("health", GET), ("small step", step)):
            began = time.perf_counter()
            status, _ = client.exchange(request)
            took[what].append(time.perf_counter() - began)
            assert status == 200
            time.sleep(PAUSE)
    return {what: figures(values) for what, values in took.items()}


def figures(values: list[float]) -> dict[str, float]:
    return {
        "count": len(values),
        "p50_ms": median(values) * 1e3,
        "p99_ms": percentile(values, 0.99) * 1e3,
        "max_ms": max(values) * 1e3,
    }


def send(url: str, instance_id: str, mb: int, seconds: float) -> None:
    """Large steps one after the other; prints how many."""
    body = b'{"instance_id": "%s", "messages": {"content": "%s"}}' % (instance_id.encode(), b"x" * (mb * 10**6))
    request = post(address(url)[0], "step", body)
    sent = 0
    end = time.monotonic() + seconds
    with BlockingClient(url) as client:
        while time.monotonic() < end:
            status, reply = client.exchange(request)
            assert status == 200
            assert len(reply) > mb * 10**6
            sent += 1
    print(sent)


if __name__ == "__main__":
    sys.exit(main())
