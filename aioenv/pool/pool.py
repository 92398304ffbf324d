"""All instances of a server: made, found, listed, ended."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Any, NoReturn

from aioenv.config import Settings
from aioenv.envs.registry import EnvSpec, find_env, known_envs
from aioenv.errors import (
    AioenvError,
    AtCapacity,
    Draining,
    EnvError,
    InstanceConflict,
    InstanceGone,
    InternalError,
    Starting,
    UnknownEnv,
    UnknownInstance,
)
from aioenv.pool import jobs
from aioenv.pool.instance import Instance
from aioenv.pool.linux import private_memory
from aioenv.pool.process import WorkerDied, WorkerProcess, start_root
from aioenv.pool.state import State
from aioenv.pool.template import Template

log = logging.getLogger("aioenv.pool")

# What ended is remembered so long, in seconds, and so many at most.
TOMBSTONE_TTL = 3600.0
TOMBSTONES = 10_000


class Pool:
    """`start`, then `create`, `instance(id).step(…)`, `release`; `close` at the end. For one event loop."""

    def __init__(self, settings: Settings) -> None:
        """Raises UnknownEnv where an env of the settings does not exist. Starts nothing."""
        self.settings = settings
        known = known_envs(settings.env_dir, settings.env_file)
        self._specs: dict[str, EnvSpec] = {name: find_env(name, known) for name in settings.envs}
        self._templates: dict[str, Template] = {}
        self._instances: dict[str, Instance] = {}
        self._tombstones: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._jobs = jobs.Jobs()
        self._root: WorkerProcess | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._draining = False
        self.scratch = Path()

    # -- start and end -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Prepare and load all envs. Raises EnvError, with the traceback, where one can't be."""
        if self.settings.keep_outputs is not None:
            self.settings.keep_outputs.mkdir(parents=True, exist_ok=True)
        if self.settings.scratch is not None:
            self.settings.scratch.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(prefix="aioenv-", dir=self.settings.scratch))
        self._root = await start_root()
        await asyncio.gather(*(self._start_env(spec) for spec in self._specs.values()))

    async def _start_env(self, spec: EnvSpec) -> None:
        environ = await self._jobs.run(jobs.prepare_env, spec.to_dict(), self.settings.env_options)
        assert self._root is not None
        folder = self.scratch / "templates" / _folder_name(spec.name)
        template = Template(spec, environ, folder, self._root)
        try:
            await template.load()
        except WorkerDied as death:
            raise InternalError(f"env {spec.name} could not be loaded: {death}") from None
        self._templates[spec.name] = template

    async def close(self) -> None:
        """End all: worlds, templates, jobs, folders. Calls that run may end first, within `stop_grace`."""
        self._draining = True
        for instance in list(self._instances.values()):
            self._end_soon(instance, "the server shut down")
        if self._endings:
            await asyncio.wait(self._endings, timeout=self.settings.stop_grace)
        for instance in list(self._instances.values()):
            if instance.process is not None:
                instance.process.kill("the server shut down")
        while self._endings:
            await asyncio.wait(self._endings)
        await asyncio.gather(*(template.close() for template in self._templates.values()))
        await self._jobs.close()
        if self._root is not None:
            self._root.kill("the server shut down")
            await self._root.ended
        if self.scratch != Path():
            await asyncio.to_thread(shutil.rmtree, self.scratch, ignore_errors=True)

    # -- instances ---------------------------------------------------------------------------------------------------

    async def create(self, env: str | None, task_id: str, instance_id: str | None, params: dict[str, Any]) -> Any:
        """The first reply of a new instance, or of the one that has this id, env, task and params already.

        Raises UnknownEnv, UnknownTask, BadRequest, InstanceConflict, AtCapacity, Starting, Draining, EnvError,
        StepTimeout. Where it raises, nothing is left of the instance. Cancelling it does not end the creation.
        """
        env = env or self.settings.envs[0]
        if env not in self._specs:
            raise UnknownEnv(f"unknown env {env!r}; this server has: {', '.join(self._specs)}")
        instance_id = instance_id or uuid.uuid4().hex
        while (existing := self._instances.get(instance_id)) is not None:
            if existing.life.state in (State.CLOSING, State.ENDED):
                await existing.gone.wait()
                continue
            if not existing.same_as(env, task_id, params):
                raise InstanceConflict(f"instance {instance_id} exists, with another env, task or params")
            assert existing.initial is not None
            return await asyncio.shield(existing.initial)
        self._refuse_if_not_ready(env)
        folder = self.scratch / "worlds" / instance_id
        instance = Instance(instance_id, env, task_id, params, folder, self.settings.limits)
        self._instances[instance_id] = instance
        self._tombstones.pop(instance_id, None)
        instance.initial = asyncio.create_task(self._begin(instance))
        return await asyncio.shield(instance.initial)

    def _refuse_if_not_ready(self, env: str) -> None:
        if self._draining:
            raise Draining("the server is shutting down")
        if env not in self._templates:
            raise Starting(f"env {env} is being loaded")
        limit = self.settings.limits.max_instances
        if len(self._instances) >= limit:
            raise AtCapacity(f"{limit} instances live here, which is the limit; release some, or raise --max-instances")

    async def _begin(self, instance: Instance) -> dict[str, Any]:
        try:
            instance.folder.mkdir(parents=True)
            process = await self._templates[instance.env].fork(f"instance {instance.id}", instance.folder)
            process.ended.add_done_callback(lambda ended: self._process_ended(instance, ended.result()))
            return await instance.begin(process)
        except BaseException as error:
            self._end_soon(instance, "it could not be created")
            await instance.gone.wait()
            if isinstance(error, InstanceGone):
                # To the caller it never lived.
                raise EnvError(f"the world died while it was created: {instance.process_cause}") from None
            if isinstance(error, AioenvError | asyncio.CancelledError):
                raise
            log.exception("instance %s could not be created", instance.id)
            raise InternalError(f"instance {instance.id} could not be created: {error!r}") from error

    def instance(self, instance_id: str) -> Instance:
        """The living instance. Raises UnknownInstance or InstanceGone, which says why."""
        instance = self._instances.get(instance_id)
        if instance is None:
            self._raise_missing(instance_id)
        if instance.life.state in (State.CLOSING, State.ENDED):
            raise instance.gone_error()
        return instance

    def _raise_missing(self, instance_id: str) -> NoReturn:
        tombstone = self._tombstones.get(instance_id)
        if tombstone is not None:
            raise InstanceGone(f"instance {instance_id} is gone: {tombstone[1]}")
        raise UnknownInstance(f"there is no instance {instance_id}; GET /instances lists those that live")

    async def release(self, instance_id: str) -> bool:
        """End an instance, after the calls that came before. False if there is none (any more)."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return False
        assert instance.initial is not None
        await asyncio.wait([instance.initial])
        async with instance.turn:
            if not instance.life.takes_calls:
                return False
            self._end_soon(instance, "released")
        await instance.gone.wait()
        return True

    def reap(self, now: float) -> list[str]:
        """End what has been idle for too long; the ids. Never one that is busy, or has a call waiting."""
        self._forget_tombstones(now)
        ttl = self.settings.idle_ttl
        reaped = []
        for instance in list(self._instances.values()):
            try:
                idle = instance.idle_for(now)
                if idle is not None and idle >= ttl:
                    self._end_soon(instance, f"idle for {idle:.0f} s")
                    reaped.append(instance.id)
            except Exception:
                log.exception("instance %s could not be reaped; going on with the others", instance.id)
        return reaped

    # -- ending ------------------------------------------------------------------------------------------------------

    def _end_soon(self, instance: Instance, cause: str) -> None:
        """The one way in which an instance ends: from here on it takes no calls, a task does the rest."""
        if instance.life.state in (State.CLOSING, State.ENDED):
            return
        instance.start_closing(cause)
        task = asyncio.create_task(self._end(instance))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    def _process_ended(self, instance: Instance, cause: str) -> None:
        """Its process is gone, whoever wanted that."""
        if instance.life.state is not State.CLOSING:
            log.warning("instance %s (%s, task %s) ended: %s", instance.id, instance.env, instance.task_id, cause)
            self._end_soon(instance, cause)

    async def _end(self, instance: Instance) -> None:
        try:
            await instance.end_process()
            await asyncio.to_thread(self._clear_folder, instance)
        except Exception:
            log.exception("ending instance %s left something behind", instance.id)
        finally:
            instance.life.to(State.ENDED)
            self._instances.pop(instance.id, None)
            if instance.has_lived:
                self._tombstones[instance.id] = (time.monotonic(), instance.life.cause or "ended")
            instance.gone.set()
            log.info("instance %s ended: %s", instance.id, instance.life.cause)

    def _clear_folder(self, instance: Instance) -> None:
        """In a thread."""
        if self.settings.keep_outputs is not None and instance.folder.exists():
            kept = self.settings.keep_outputs / instance.id
            if kept.exists():  # an id used again
                kept = kept.with_name(f"{kept.name}.{time.time_ns()}")
            shutil.move(instance.folder, kept)
        shutil.rmtree(instance.folder, ignore_errors=True)

    def _forget_tombstones(self, now: float) -> None:
        while self._tombstones:
            instance_id, (ended_at, _) = next(iter(self._tombstones.items()))
            if now - ended_at < TOMBSTONE_TTL and len(self._tombstones) <= TOMBSTONES:
                break
            del self._tombstones[instance_id]

    # -- looking -----------------------------------------------------------------------------------------------------

    async def task_ids(self, env: str | None, split: str, params: dict[str, Any]) -> list[str]:
        """Raises UnknownEnv, Starting, BadRequest, EnvError, InternalError."""
        env = env or self.settings.envs[0]
        if env not in self._specs:
            raise UnknownEnv(f"unknown env {env!r}; this server has: {', '.join(self._specs)}")
        template = self._templates.get(env)
        if template is None:
            raise Starting(f"env {env} is being loaded")
        limit = self.settings.limits.create_timeout
        spec, environ = template.spec.to_dict(), template.environ
        found: list[str] = await self._jobs.run(jobs.query_list, spec, environ, split, params, limit=limit)
        return found

    def readiness(self) -> dict[str, Any]:
        """`GET /readyz`: whether a create would be taken now, and why not."""
        reason = "ready"
        try:
            for env in self._specs:
                self._refuse_if_not_ready(env)
                if not self._templates[env].ready:
                    raise Starting(f"env {env} is being loaded")
        except (AtCapacity, Starting, Draining) as error:
            reason = str(error)
        return {
            "ready": reason == "ready",
            "reason": reason,
            "instances": len(self._instances),
            "limit": self.settings.limits.max_instances,
            "queue": 0,
        }

    async def describe(self) -> list[dict[str, Any]]:
        """`GET /instances`. `memory` is in bytes, private to the world."""
        now = time.monotonic()
        lines = [(instance.describe(now), instance.process) for instance in self._instances.values()]

        def add_memory() -> list[dict[str, Any]]:
            return [{**line, "memory": private_memory(process.pid) if process else None} for line, process in lines]

        return await asyncio.to_thread(add_memory)


def _folder_name(env: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in env)
