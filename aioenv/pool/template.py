"""A template: the process that has an env loaded and warmed, from which its worlds are forked."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from aioenv.envs.registry import EnvSpec
from aioenv.errors import Starting
from aioenv.pool.process import WorkerDied, WorkerProcess

log = logging.getLogger("aioenv.pool")


class Template:
    """Loads itself, and again when its process died. Worlds forked from it outlive it."""

    def __init__(self, spec: EnvSpec, environ: dict[str, str], folder: Path, root: WorkerProcess) -> None:
        self.spec = spec
        self.environ = environ
        self._folder = folder
        self._root = root
        self._process: WorkerProcess | None = None
        self._loading: asyncio.Task[WorkerProcess] | None = None

    @property
    def ready(self) -> bool:
        return self._process is not None and not self._process.ended.done()

    async def load(self) -> None:
        """Raises EnvError, with the traceback, where the env can't be loaded, and WorkerDied."""
        self._process = None
        self._process = await self._start()

    async def _start(self) -> WorkerProcess:
        began = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        process = await self._root.fork(f"the template of {self.spec.name}", self._folder)
        process.bears_children = True
        try:
            await process.call("load", spec=self.spec.to_dict(), environ=self.environ)
        except BaseException:
            process.kill("its env could not be loaded")
            raise
        log.info("env %s (%s) is loaded, after %.1f s", self.spec.name, self.spec.origin, time.monotonic() - began)
        return process

    async def fork(self, name: str, folder: Path) -> WorkerProcess:
        """A process that is about to become a world. Raises Starting while the template is not there."""
        process = self._process
        if process is None or process.ended.done():
            self._reload()
            raise Starting(f"env {self.spec.name} is being loaded")
        try:
            return await process.fork(name, folder)
        except WorkerDied as death:
            log.error("the template of env %s is gone: %s; loading it again", self.spec.name, death)
            self._reload()
            raise Starting(f"env {self.spec.name} is being loaded again: its template is gone ({death})") from None

    def _reload(self) -> None:
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._start())
            self._loading.add_done_callback(self._reloaded)

    def _reloaded(self, task: asyncio.Task[WorkerProcess]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._process = task.result()
        else:
            log.error("env %s can't be loaded any more: %s", self.spec.name, error)

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait([self._loading])
        if self._process is not None:
            self._process.kill("the server shuts down")
            await self._process.ended
