"""A template: the process that has an env loaded and warmed, from which its worlds are forked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioenv.envs.registry import EnvSpec
from aioenv.errors import AioenvError, EnvError, Starting
from aioenv.pool.process import WorkerDied, WorkerProcess

log = logging.getLogger("aioenv.pool")


# Seconds that an env may take to load, and the first and the longest pause before trying again.
LOAD_LIMIT = 600.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0


class Template:
    """Loads itself, and again, by itself, when its process died. Worlds forked from it outlive it."""

    def __init__(self, spec: EnvSpec, environ: dict[str, str], folder: Path, root: Callable[[], WorkerProcess]) -> None:
        self.spec = spec
        self.environ = environ
        self.forkable = False  # whether its worlds can be copied: known when it is loaded
        self._folder = folder
        self._root = root
        self._process: WorkerProcess | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._closed = False
        self._why_not = "is being loaded"

    @property
    def ready(self) -> bool:
        return self._process is not None and self._process.takes_calls

    async def load(self) -> None:
        """Raises EnvError, with the traceback, where the env can't be loaded, and WorkerDied."""
        began = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        process = await self._root().fork(f"the template of {self.spec.name}", self._folder)
        process.bears_children = True
        try:
            async with asyncio.timeout(LOAD_LIMIT):
                loaded = await process.call("load", spec=self.spec.to_dict(), environ=self.environ)
        except BaseException as error:
            process.kill("its env could not be loaded")
            if isinstance(error, TimeoutError):
                raise EnvError(f"env {self.spec.name} was not loaded within {LOAD_LIMIT:g} s") from None
            raise
        self.forkable = bool(loaded["forkable"])
        self._process = process
        process.ended.add_done_callback(self._process_ended)
        log.info("env %s (%s) is loaded, after %.1f s", self.spec.name, self.spec.origin, time.monotonic() - began)

    async def fork(self, name: str, folder: Path, confinement: dict[str, Any]) -> WorkerProcess:
        """A process that is about to become a world, confined (confine.py). Raises Starting while none is there."""
        process = self._process
        if process is None or process.ended.done():
            raise Starting(f"env {self.spec.name} {self._why_not}")
        try:
            return await process.fork(name, folder, confinement)
        except WorkerDied as death:
            raise Starting(f"env {self.spec.name} is being loaded again: its template is gone ({death})") from None

    def _process_ended(self, ended: asyncio.Future[str]) -> None:
        if not self._closed:
            self._why_not = f"is being loaded again: its template is gone ({ended.result()})"
            log.error("env %s %s", self.spec.name, self._why_not)
            self._reloading = asyncio.create_task(self._reload())

    async def _reload(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                await self.load()
                return
            except (AioenvError, WorkerDied, OSError) as error:
                self._why_not = f"can't be loaded any more; the next try is in {pause:g} s: {error}"
                log.error("env %s %s", self.spec.name, self._why_not)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def close(self) -> None:
        self._closed = True
        if self._reloading is not None:
            self._reloading.cancel()
            await asyncio.wait([self._reloading])
        if self._process is not None:
            self._process.kill("the server shuts down")
            await self._process.ended
