"""All instances of a server: made, found, listed, ended."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
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
    CallerError,
    Draining,
    EnvError,
    InstanceConflict,
    InstanceGone,
    InternalError,
    Starting,
    UnknownEnv,
    UnknownInstance,
)
from aioenv.linux import private_memory
from aioenv.pool import jobs
from aioenv.pool.groups import Groups
from aioenv.pool.instance import Instance, last_line
from aioenv.pool.process import WorkerDied, WorkerProcess, start_root
from aioenv.pool.scratch import Scratch, remove
from aioenv.pool.state import State
from aioenv.pool.template import Template

log = logging.getLogger("aioenv.pool")

# What ended is remembered so long, in seconds, and so many at most.
TOMBSTONE_TTL = 3600.0
TOMBSTONES = 10_000
# Seconds from the end of an instance to looking for what it left: those of the meantime are looked for together.
SWEEP_DELAY = 0.2


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
        self._groups = Groups(settings.group_templates, settings.group_ttl, settings.limits.create_timeout)
        self._admission = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        self._jobs = jobs.Jobs()
        self._root: WorkerProcess | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._draining = False
        self._sweeping: asyncio.Task[None] | None = None
        self._scratch: Scratch | None = None

    @property
    def scratch(self) -> Path:
        """The folder with the instances' folders, of a pool that was opened."""
        assert self._scratch is not None
        return self._scratch.path

    # -- start and end -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the folders. Raises OSError where they can't be made."""
        if self.settings.keep_outputs is not None:
            self.settings.keep_outputs.mkdir(parents=True, exist_ok=True)
        self._scratch = Scratch(self.settings.scratch)

    async def start(self) -> None:
        """Prepare and load all envs. Raises EnvError, with the traceback, where one can't be."""
        assert self._scratch is not None
        await asyncio.to_thread(self._scratch.remove_leftovers)
        self._root = await self._start_root()
        await asyncio.gather(*(self._start_env(spec) for spec in self._specs.values()))

    async def _start_root(self) -> WorkerProcess:
        root = await start_root()
        root.ended.add_done_callback(lambda _: self._root_ended(root))
        return root

    def _root_ended(self, root: WorkerProcess) -> None:
        """Somebody killed it. Templates and worlds live on, but new templates need a root."""
        if self._draining or root is not self._root:
            return
        log.error("the root process is gone (%s); starting another", root.ended.result())

        async def restart() -> None:
            self._root = await self._start_root()

        task = asyncio.create_task(restart())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _start_env(self, spec: EnvSpec) -> None:
        environ = await self._jobs.run(jobs.prepare_env, spec.to_dict(), self.settings.env_options)
        folder = self.scratch / "templates" / _folder_name(spec.name)
        template = Template(spec, environ, folder, self._living_root)
        try:
            await template.load()
        except WorkerDied as death:
            raise InternalError(f"env {spec.name} could not be loaded: {death}") from None
        self._templates[spec.name] = template

    def _living_root(self) -> WorkerProcess:
        assert self._root is not None
        return self._root

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
        await self._groups.close()
        await asyncio.gather(*(template.close() for template in self._templates.values()))
        await self._jobs.close()
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])
        if self._root is not None:
            self._root.kill("the server shut down")
            await self._root.ended
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.close)

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
        instance = Instance(instance_id, env, task_id, params, self.settings.limits)
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
            assert self._scratch is not None
            instance.folder = self._scratch.new_world(instance.id)
            async with self._admission:  # a few at a time, in their order, so that living worlds can go on
                return await self._make_world(instance)
        except BaseException as error:
            self._end_soon(instance, "it could not be created")
            await instance.gone.wait()
            raise self._creation_error(instance, error) from None

    def _creation_error(self, instance: Instance, error: BaseException) -> BaseException:
        """What the caller is told of a creation that failed; logged where it is not the caller's own mistake."""
        if isinstance(error, InstanceGone):
            if self._draining:
                return Draining("the server is shutting down")
            # To the caller it never lived.
            error = EnvError(f"the world died while it was created: {instance.process_cause}")
        elif isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            error = AtCapacity(f"this machine has no room for another world ({error.strerror})")
        elif not isinstance(error, AioenvError | asyncio.CancelledError):
            log.error("instance %s could not be created", instance.id, exc_info=error)
            error = InternalError(f"instance {instance.id} could not be created: {error!r}")
        if not isinstance(error, CallerError | asyncio.CancelledError):
            log.warning(
                "instance %s (%s, task %s) could not be created: %s",
                instance.id,
                instance.env,
                instance.task_id,
                last_line(error),
            )
        return error

    async def _make_world(self, instance: Instance) -> dict[str, Any]:
        """By the shortest way: a copy of the group's world, else a fork of the env's template."""
        template, folder = self._templates[instance.env], instance.folder
        assert folder is not None
        name = f"instance {instance.id}"
        if self._groups.serves(template):
            process, initial = await self._groups.fork(
                template, instance.task_id, instance.params, name, folder, self.scratch
            )
        else:
            process, initial = await template.fork(name, folder), None
        process.ended.add_done_callback(lambda ended: self._process_ended(instance, ended.result()))
        return await instance.begin(process, initial)

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
        self._groups.drop_idle(now)
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
            self._end_soon(instance, cause)

    async def _end(self, instance: Instance) -> None:
        try:
            await instance.end_process(self.settings.keep_outputs is not None)
            await asyncio.to_thread(self._clear_folder, instance)
        except Exception:
            log.exception("ending instance %s left something behind", instance.id)
        finally:
            instance.life.to(State.ENDED)
            self._instances.pop(instance.id, None)
            if instance.has_lived:
                self._tombstones[instance.id] = (time.monotonic(), instance.life.cause or "ended")
            instance.gone.set()
            log.info(
                "instance %s (%s, task %s) ended: %s",
                instance.id,
                instance.env,
                instance.task_id,
                instance.life.cause,
            )
            self._sweep_soon()

    def _sweep_soon(self) -> None:
        """End what worlds left behind (daemons with a session of their own), until a round finds nothing."""
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        try:
            found = 1
            while found:
                await asyncio.sleep(SWEEP_DELAY)
                living = [str(instance.folder) for instance in self._instances.values() if instance.folder]
                found = await self._living_root().sweep(living)
        except (WorkerDied, AioenvError) as error:
            log.warning("could not look for processes that worlds left behind: %s", error)

    def _clear_folder(self, instance: Instance) -> None:
        """In a thread."""
        if instance.folder is None:
            return
        if self.settings.keep_outputs is not None and instance.has_lived and instance.folder.is_dir():
            kept = self.settings.keep_outputs / instance.id
            if kept.exists():  # an id used again
                kept = kept.with_name(f"{kept.name}.{time.time_ns()}")
            shutil.move(instance.folder, kept)
        remove(instance.folder)

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
            "group_templates": len(self._groups),
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
