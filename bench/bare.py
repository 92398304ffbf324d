"""The least that an aiohttp server can do for a step: read JSON, send JSON. What the service's overhead is relative to.

python bench/bare.py asyncio|uvloop REPLY      REPLY is the JSON that every request is answered with
"""

from __future__ import annotations

import asyncio
import signal
import sys

import orjson
from aiohttp import web


async def serve(reply: bytes) -> None:
    """Until SIGTERM."""
    answer = orjson.loads(reply)

    async def step(request: web.Request) -> web.Response:
        orjson.loads(await request.read())
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    app = web.Application()
    app.router.add_post("/step", step)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"listening on http://127.0.0.1:{runner.addresses[0][1]}")
    print("ready", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    if sys.argv[1] == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(sys.argv[2].encode()))
    else:
        asyncio.run(serve(sys.argv[2].encode()))


if __name__ == "__main__":
    main()
