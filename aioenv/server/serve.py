"""One server's life: listen, start the pool, run until told to stop, end everything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from aioenv.config import Settings
from aioenv.errors import AioenvError
from aioenv.pool.pool import Pool
from aioenv.pool.reaper import reap_forever
from aioenv.pool.watch import Watch
from aioenv.server.app import make_app

log = logging.getLogger("aioenv.server")


class CannotListen(AioenvError):
    pass


@contextlib.asynccontextmanager
async def running(settings: Settings, listening: Callable[[str], None] = lambda url: None) -> AsyncIterator[Pool]:
    """A server that listens and whose envs are loaded, for as long as the block lasts.

    `listening` is called with the URL before the envs are loaded; until then creates are answered 503 `starting`.
    Raises CannotListen, OSError where its folders can't be made, UnknownEnv, and EnvError where an env can't be loaded.
    """
    pool = Pool(settings)
    runner = web.AppRunner(make_app(pool), access_log=None, shutdown_timeout=5.0)
    helpers: list[asyncio.Task[None]] = []
    try:
        pool.open()
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port)
        try:
            await site.start()
        except OSError as error:
            raise CannotListen(
                f"can't listen on {settings.host}:{settings.port}: {os.strerror(error.errno or 0)}; --port chooses"
                " another, 0 a free one"
            ) from None
        listening(_url(runner))
        await pool.start()
        helpers += [
            asyncio.create_task(reap_forever(pool, settings.reap_interval)),
            asyncio.create_task(Watch(pool).run()),
        ]
        yield pool
    finally:
        for helper in helpers:
            helper.cancel()
        if helpers:
            await asyncio.wait(helpers)
        await pool.close()
        await runner.cleanup()


async def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM. `say` gets the lines for a person."""
    this = asyncio.current_task()
    assert this is not None
    stopped = False

    def stop(number: signal.Signals) -> None:
        nonlocal stopped
        if stopped:
            # Asked twice: no waiting. Every process of ours dies with this one (lifeline.py).
            os._exit(128 + number)
        stopped = True
        this.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    names = ", ".join(settings.envs)
    try:
        async with running(settings, lambda url: say(f"listening on {url}, loading {names}")) as pool:
            # What lives now lives on: the collector need not walk over it again and again.
            gc.collect()
            gc.freeze()
            say("ready")
            try:
                await asyncio.Event().wait()
            finally:
                left = pool.readiness()["instances"]
                grace = f", up to {settings.stop_grace:g} s for calls that run (again to stop at once)" if left else ""
                say(f"stopping: {left} instances to end{grace}")
    except asyncio.CancelledError:
        say("stopped")


def _url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
