"""Where worlds come from: the root process, the envs' templates, and group templates. And where orphans end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioenv.config import Settings
from aioenv.envs.registry import EnvSpec, find_env, known_envs
from aioenv.errors import AioenvError, InternalError, Starting, UnknownEnv
from aioenv.pool import jobs
from aioenv.pool.groups import Groups
from aioenv.pool.process import WorkerDied, WorkerProcess, start_root
from aioenv.pool.template import Template

log = logging.getLogger("aioenv.pool")

# How often what worlds left behind is looked for again, as it may make more of its kind, and seconds in between.
SWEEP_ROUNDS, SWEEP_PAUSE = 50, 0.02


class Nursery:
    """`start`, then `fork`; `close` at the end."""

    def __init__(self, settings: Settings, confinement: dict[str, Any], living: Callable[[], list[str]]) -> None:
        """`living` gives the folders of worlds whose daemons are spared. Raises UnknownEnv. Starts nothing."""
        self.confinement = confinement
        self.groups = Groups(settings.group_templates, settings.group_ttl, settings.limits.create_timeout, confinement)
        self._settings = settings
        known = known_envs(settings.env_dir, settings.env_file)
        self._specs: dict[str, EnvSpec] = {name: find_env(name, known) for name in settings.envs}
        self._templates: dict[str, Template] = {}
        self._jobs = jobs.Jobs()
        self._root: WorkerProcess | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._scratch = Path()
        self._closed = False
        self._living = living
        self._next_sweep: asyncio.Task[None] | None = None
        self._sweep_lock = asyncio.Lock()

    # -- start and end -----------------------------------------------------------------------------------------------

    async def start(self, scratch: Path) -> None:
        """Prepare and load all envs. Raises EnvError, with the traceback, where one can't be."""
        self._scratch = scratch
        self._root = await self._start_root()
        await asyncio.gather(*(self._start_env(spec) for spec in self._specs.values()))

    async def _start_root(self) -> WorkerProcess:
        root = await start_root()
        root.ended.add_done_callback(lambda _: self._root_ended(root))
        return root

    def _root_ended(self, root: WorkerProcess) -> None:
        """Somebody killed it. Templates and worlds live on, but new templates need a root."""
        if self._closed or root is not self._root:
            return
        log.error("the root process is gone (%s); starting another", root.ended.result())

        async def restart() -> None:
            self._root = await self._start_root()

        self._restarting = asyncio.create_task(restart())

    async def _start_env(self, spec: EnvSpec) -> None:
        environ = await self._jobs.run(jobs.prepare_env, spec.to_dict(), self._settings.env_options)
        folder = self._scratch / "templates" / _folder_name(spec.name)
        template = Template(spec, environ, folder, self.root)
        try:
            await template.load()
        except WorkerDied as death:
            raise InternalError(f"env {spec.name} could not be loaded: {death}") from None
        self._templates[spec.name] = template

    def root(self) -> WorkerProcess:
        assert self._root is not None
        return self._root

    async def close(self) -> None:
        self._closed = True
        await self.groups.close()
        await asyncio.gather(*(template.close() for template in self._templates.values()))
        await self._jobs.close()
        if self._restarting is not None:
            await asyncio.wait([self._restarting])
        if self._root is not None:
            self._root.kill("the server shut down")
            await self._root.ended

    # -- envs --------------------------------------------------------------------------------------------------------

    def name_of(self, env: str | None) -> str:
        """The env that a request means. Raises UnknownEnv."""
        env = env or self._settings.envs[0]
        if env not in self._specs:
            raise UnknownEnv(f"unknown env {env!r}; this server has: {', '.join(self._specs)}")
        return env

    def template(self, env: str) -> Template:
        """Raises Starting where it has not been loaded yet."""
        if env not in self._templates:
            raise Starting(f"env {env} is being loaded")
        return self._templates[env]

    def refuse_if_not_ready(self) -> None:
        """Raises Starting where an env is not loaded, or loaded again."""
        for env in self._specs:
            if not self.template(env).ready:
                raise Starting(f"env {env} is being loaded")

    async def task_ids(self, env: str, split: str, params: dict[str, Any]) -> list[str]:
        """Raises Starting, BadRequest, EnvError, InternalError."""
        template = self.template(env)
        spec, limit = template.spec.to_dict(), self._settings.limits.create_timeout
        found: list[str] = await self._jobs.run(jobs.query_list, spec, template.environ, split, params, limit=limit)
        return found

    async def fork(
        self, env: str, task_id: str, params: dict[str, Any], name: str, folder: Path
    ) -> tuple[WorkerProcess, Any]:
        """A process for a world, by the shortest way: a copy of the group's world, with what that observed first, else
        a fork of the env's template, and None."""
        template = self.template(env)
        if self.groups.serves(template):
            return await self.groups.fork(template, task_id, params, name, folder, self._scratch)
        return await template.fork(name, folder, self.confinement), None

    # -- orphans -----------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """End what worlds whose process is gone left behind (daemons with a session of their own).

        A sweep is for all who asked before it began.
        """
        if self._next_sweep is None:
            self._next_sweep = asyncio.create_task(self._sweep())
        await asyncio.shield(self._next_sweep)

    async def _sweep(self) -> None:
        async with self._sweep_lock:
            self._next_sweep = None
            try:
                for _ in range(SWEEP_ROUNDS):
                    if not await self.root().sweep(self._living()):
                        return
                    await asyncio.sleep(SWEEP_PAUSE)
                log.warning("worlds left processes behind that go on making others")
            except (WorkerDied, AioenvError) as error:
                log.warning("could not look for processes that worlds left behind: %s", error)


def _folder_name(env: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in env)
