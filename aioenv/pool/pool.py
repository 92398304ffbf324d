"""All instances of a server: made, found, listed, ended."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aioenv.config import Settings
from aioenv.errors import (
    AioenvError,
    AtCapacity,
    Busy,
    CallerError,
    Draining,
    EnvError,
    InstanceConflict,
    InstanceGone,
    InternalError,
)
from aioenv.linux import private_memory
from aioenv.pool import jobs
from aioenv.pool.branches import Branches, Checkpoint
from aioenv.pool.confine import Confinement
from aioenv.pool.graves import Graves
from aioenv.pool.instance import Instance, Messages, call_print, last_line
from aioenv.pool.nursery import Nursery
from aioenv.pool.process import WorkerProcess
from aioenv.pool.replay import Reply
from aioenv.pool.scratch import Scratch, remove
from aioenv.pool.slots import Slots
from aioenv.pool.state import State

log = logging.getLogger("aioenv.pool")

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}


class Pool:
    """`start`, then `create`, `call`, `release`; `close` at the end. For one event loop."""

    def __init__(self, settings: Settings) -> None:
        """Raises UnknownEnv where an env of the settings does not exist. Starts nothing."""
        self.settings = settings
        self._instances: dict[str, Instance] = {}
        self._graves = Graves()
        limits = settings.limits
        confinement = Confinement(limits.memory, limits.open_files, limits.disk, limits.max_answer)
        self.nursery = Nursery(settings, asdict(confinement), self._living_folders)
        self.branches = Branches(self, settings.checkpoint_ttl)
        self._slots = Slots(limits.max_instances, limits.create_queue, limits.queue_timeout)
        self._admission = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        # For bodies that are too large for the event loop. Apart from jobs of envs, which may take long.
        self.bodies = jobs.Jobs()
        self._endings: set[asyncio.Task[None]] = set()
        self._draining = False
        self._scratch: Scratch | None = None

    # -- for watch.py ------------------------------------------------------------------------------------------------

    def living(self) -> list[Instance]:
        return list(self._instances.values())

    def _living_folders(self) -> list[str]:
        """Of worlds whose process lives, and of those that sleep."""
        worlds = [one.folder for one in self.living() if one.process and not one.process.ended.done()]
        return [str(folder) for folder in [*worlds, *self.branches.folders()]]

    def family(self) -> tuple[int, set[int]]:
        """The root's pid, and those of all processes that are known here."""
        root = self.nursery.root()
        return root.pid, root.family

    def kill(self, instance_id: str, pid: int, cause: str) -> None:
        """End an instance that does harm, whatever it is doing. Harmless where its process is gone already."""
        instance = self._instances.get(instance_id)
        if instance is not None and instance.process is not None and instance.process.pid == pid:
            instance.process.kill(cause)

    def set_full(self, why: str | None) -> None:
        """Whether there is room on the disk for more instances, and why not."""
        if self._scratch is not None:
            self._scratch.why_full = why

    @property
    def scratch_limit(self) -> int:
        """Bytes that all folders in `scratch` may take."""
        assert self._scratch is not None
        return self.settings.scratch_limit or self._scratch.free_at_start * 9 // 10

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
        await self.nursery.start(self.scratch)

    async def close(self) -> None:
        """End all: worlds, templates, jobs, folders. Calls that run may end first, within `stop_grace`."""
        self._draining = True
        self._slots.close(_draining())
        for instance in list(self._instances.values()):
            self._end_soon(instance, "the server shut down")
        if self._endings:
            await asyncio.wait(self._endings, timeout=self.settings.stop_grace)
        for instance in list(self._instances.values()):
            if instance.process is not None:
                instance.process.kill("the server shut down")
        while self._endings:
            await asyncio.wait(self._endings)
        await self.branches.close()
        await self.nursery.close()
        await self.bodies.close()
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.close)

    # -- instances ---------------------------------------------------------------------------------------------------

    async def create(
        self,
        env: str | None,
        task_id: str,
        instance_id: str | None,
        params: dict[str, Any],
        request_id: str | None = None,
        hung_up: Callable[[], bool] = lambda: False,
    ) -> Reply:
        """The first reply of a new instance, or of the one that has this id, env, task and params already.

        `hung_up` tells whether whoever asks is gone: then a creation that has not begun need not begin.

        Raises UnknownEnv, UnknownTask, BadRequest, InstanceConflict, InstanceGone (this very call made it, and it
        ended), AtCapacity, Starting, Draining, EnvError, StepTimeout. Where it raises, nothing is left of the
        instance. Cancelling it does not end the creation.
        """
        env = self.nursery.name_of(env)
        if instance_id is None:
            # The same for the same call, so that asking again makes no second one.
            instance_id = uuid.uuid5(uuid.NAMESPACE_OID, request_id).hex if request_id else uuid.uuid4().hex
        while (existing := self._instances.get(instance_id)) is not None:
            if existing.life.state not in (State.CLOSING, State.ENDED):
                if not existing.same_as(env, task_id, params):
                    raise InstanceConflict(f"instance {instance_id} exists, with another env, task or params")
                assert existing.initial is not None
                existing.hung_up.append(hung_up)
                reply = await asyncio.shield(existing.initial)
                same_call = request_id is not None and existing.request_id == request_id
                return reply.replayed() if same_call else reply
            await existing.gone.wait()
        if self._graves.created_by(instance_id, request_id):
            self._graves.raise_missing(instance_id)
        if self._draining:
            raise _draining()
        self.nursery.template(env)
        self._slots.refuse_if_full()
        limits = self.settings.limits
        instance = Instance(instance_id, env, task_id, params, limits, self.bodies, request_id)
        instance.hung_up.append(hung_up)
        self._instances[instance_id] = instance
        self._graves.forget(instance_id)
        instance.initial = asyncio.create_task(self._begin(instance))
        return await asyncio.shield(instance.initial)

    async def _begin(self, instance: Instance) -> Reply:
        asked = time.monotonic()
        try:
            await self._slots.take(lambda: instance.abandoned)
            instance.holds_slot = True
            async with self._admission:  # a few at a time, in their order, so that living worlds can go on
                if self._draining:
                    raise _draining()
                if instance.abandoned:
                    raise AtCapacity("the client hung up while it waited for its turn")
                began = time.monotonic()
                assert self._scratch is not None
                self._scratch.refuse_if_full()
                instance.folder = self._scratch.new_world(instance.id)
                reply = await self._make_world(instance)
                reply.queued, reply.ran = began - asked, time.monotonic() - began
                return reply
        except BaseException as error:
            self._end_soon(instance, "it could not be created")
            await instance.gone.wait()
            raise await self._creation_error(instance, error) from None

    async def _creation_error(self, instance: Instance, error: BaseException) -> BaseException:
        """What the caller is told of a creation that failed; logged where it is not the caller's own mistake."""
        if isinstance(error, InstanceGone):
            if self._draining:
                return _draining()
            # To the caller it never lived.
            log.warning("instance %s died while it was created: %s", instance.id, instance.process_cause)
            words = await instance.last_words()
            return EnvError(f"the world died while it was created: {instance.process_cause}{words}")
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            error = AtCapacity(f"this machine has no room for another world ({error.strerror})")
        elif not isinstance(error, AioenvError | asyncio.CancelledError):
            log.error("instance %s could not be created", instance.id, exc_info=error)
            error = InternalError(f"instance {instance.id} could not be created: {error!r}")
        if not isinstance(error, CallerError | asyncio.CancelledError):
            log.log(
                logging.INFO if instance.process is None else logging.WARNING,
                "instance %s (%s, task %s) could not be created: %s",
                instance.id,
                instance.env,
                instance.task_id,
                last_line(error),
            )
        return error

    async def _make_world(self, instance: Instance) -> Reply:
        assert instance.folder is not None
        process, initial = await self.nursery.fork(
            instance.env, instance.task_id, instance.params, f"instance {instance.id}", instance.folder
        )
        self.attach(instance, process)
        return await instance.begin(process, initial)

    # -- branches ----------------------------------------------------------------------------------------------------

    async def fork(self, instance_id: str, ids: list[str], request_id: str | None = None) -> Reply:
        """Copies of an instance, one for each of `ids`. Raises as `Branches.fork`, and UnknownInstance."""
        source = self._living(instance_id)
        what = call_print("fork", {}, {"ids": ids})
        return await source.once(request_id, what, lambda: self.branches.fork(source, ids))

    async def checkpoint(
        self, instance_id: str, keep: bool = False, ttl: float | None = None, request_id: str | None = None
    ) -> Reply:
        """A sleeping copy of an instance. Raises as `Branches.checkpoint`, and UnknownInstance."""
        source = self._living(instance_id)
        what = call_print("checkpoint", {}, {"keep": keep, "ttl": ttl})
        return await source.once(request_id, what, lambda: self.branches.checkpoint(source, keep, ttl))

    async def restore(self, instance_id: str, checkpoint: str | None, request_id: str | None = None) -> Reply:
        """Put an instance back to a checkpoint. One that is gone comes back, if the checkpoint was kept.

        Raises as `Branches.restore` and `revive`, and UnknownInstance.
        """
        what = call_print("restore", {}, {"checkpoint": checkpoint})
        instance = self._instances.get(instance_id)
        if instance is not None and instance.life.state in (State.CLOSING, State.ENDED):
            await instance.gone.wait()
            instance = self._instances.get(instance_id)
        if instance is None:
            if not self.branches.of(instance_id):
                self._graves.raise_missing(instance_id)
            found = self.branches.find(instance_id, checkpoint)
            branch = self.new_branch(instance_id, found)
            return await branch.once(request_id, what, lambda: self.branches.revive(branch, found))
        living = instance
        return await living.once(request_id, what, lambda: self.branches.restore(living, checkpoint))

    def forkable(self, env: str) -> bool:
        return self.nursery.template(env).forkable

    def has(self, instance_id: str) -> bool:
        return instance_id in self._instances

    def new_branch(self, instance_id: str, source: Instance | Checkpoint) -> Instance:
        """A copy to be: known from here on, without a process. `source` has its env, task and params."""
        if self._draining:
            raise _draining()
        branch = Instance(instance_id, source.env, source.task_id, source.params, self.settings.limits, self.bodies)
        branch.branch_of = source.id if isinstance(source, Instance) else source.instance_id
        branch.initial = asyncio.get_running_loop().create_future()
        self._instances[instance_id] = branch
        self._graves.forget(instance_id)
        return branch

    def new_folder(self, instance_id: str, beside: bool = False) -> Path:
        """For an instance; `beside` the one that it has. Raises AtCapacity where the disk is full."""
        assert self._scratch is not None
        self._scratch.refuse_if_full()
        return self._scratch.beside(instance_id) if beside else self._scratch.new_world(instance_id)

    async def take_slot(self, instance: Instance) -> None:
        await self._slots.take(lambda: False)
        instance.holds_slot = True

    async def take_room(self) -> None:
        """For a process that is no instance's. Raises AtCapacity."""
        await self._slots.take(lambda: False)

    def give_room_back(self) -> None:
        self._slots.give_back()

    async def end_branches(self, branches: list[Instance], cause: str) -> None:
        """Those that could not begin: nothing is left of them."""
        for branch in branches:
            assert branch.initial is not None
            branch.initial.cancel()
            self._end_soon(branch, cause)
        for branch in branches:
            await branch.gone.wait()

    # -- calls -------------------------------------------------------------------------------------------------------

    def _living(self, instance_id: str) -> Instance:
        instance = self._instances.get(instance_id)
        if instance is None:
            self._graves.raise_missing(instance_id)
        return instance

    async def call(
        self, op: str, instance_id: str, messages: Messages, params: dict[str, Any], request_id: str | None = None
    ) -> Reply:
        """`step`, `evaluate` or `get_info` of an instance. Raises what `Instance.call` does, and UnknownInstance."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return await self._call_again(op, instance_id, messages, params, request_id)
        return await instance.call(op, messages, params, request_id)

    async def _call_again(
        self, op: str, instance_id: str, messages: Messages, params: dict[str, Any], request_id: str | None
    ) -> Reply:
        """Of an instance that is not here (any more): what was answered before, or why it is not."""
        before = self._graves.call(instance_id, request_id)
        if before is None or request_id is None:
            self._graves.raise_missing(instance_id)
        return await before.again(request_id, call_print(op, messages, params))

    async def release(self, instance_id: str, request_id: str | None = None) -> bool:
        """End an instance, after the calls that came before. False if there is none (any more), but for the call
        that ended it, asked again."""
        instance = self._instances.get(instance_id)
        if instance is not None:
            assert instance.initial is not None
            await asyncio.wait([instance.initial])
            async with instance.turn:
                mine = instance.life.takes_calls
                if mine:
                    instance.released_by = request_id
                    self._end_soon(instance, "released")
            await instance.gone.wait()
            return mine or (request_id is not None and instance.released_by == request_id)
        return self._graves.released_by(instance_id, request_id)

    def reap(self, now: float) -> list[str]:
        """End what has been idle for too long, or alive; the ids. Never one that is busy, or has a call waiting.

        Looking and marking happen in one go: a call comes before, and is served, or after, and is told.
        """
        self._graves.forget_old(now)
        self.nursery.groups.drop_idle(now)
        self.branches.drop_old(now)
        ttl, most = self.settings.idle_ttl, self.settings.max_lifetime
        reaped = []
        for instance in list(self._instances.values()):
            try:
                idle = instance.idle_for(now)
                if idle is not None and idle >= ttl:
                    self._end_soon(instance, f"idle for {idle:.0f} s")
                    reaped.append(instance.id)
                elif idle is not None and most is not None and now - instance.created_at >= most:
                    self._end_soon(instance, f"alive for {most:.0f} s, its maximum lifetime")
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

    def attach(self, instance: Instance, process: WorkerProcess) -> None:
        """From here on this is its process, whose end is its own."""
        instance.process = process
        process.ended.add_done_callback(lambda ended: self._process_ended(instance, process, ended.result()))

    def _process_ended(self, instance: Instance, process: WorkerProcess, cause: str) -> None:
        """Its process is gone, whoever wanted that."""
        if process is not instance.process:
            return  # it has another by now
        if instance.life.state is not State.CLOSING:
            instance.died = True
            self._end_soon(instance, cause)

    async def _end(self, instance: Instance) -> None:
        try:
            await instance.end_process(self.settings.keep_outputs is not None)
            if instance.died:
                await instance.last_words()
            if instance.process is not None:
                await self.nursery.sweep()  # before its folder goes: they may write there
            await asyncio.to_thread(self._clear_folder, instance)
        except Exception:
            log.exception("ending instance %s left something behind", instance.id)
        finally:
            instance.life.to(State.ENDED)
            self._instances.pop(instance.id, None)
            if instance.holds_slot:
                self._slots.give_back()
            self.branches.instance_ended(instance.id)
            if instance.has_lived:
                self._graves.bury(instance)
            instance.gone.set()
            if instance.process is not None:
                self._log_end(instance)

    def _log_end(self, instance: Instance) -> None:
        life = instance.life
        log.log(
            logging.WARNING if instance.died and instance.has_lived else logging.INFO,
            "instance %s (%s, task %s) ended after %d steps: %s; it was %s%s",
            instance.id,
            instance.env,
            instance.task_id,
            instance.steps,
            life.cause,
            life.told,
            instance.words_so_far,
        )

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

    # -- looking -----------------------------------------------------------------------------------------------------

    async def task_ids(self, env: str | None, split: str, params: dict[str, Any]) -> list[str]:
        """Raises UnknownEnv, Starting, BadRequest, EnvError, InternalError."""
        return await self.nursery.task_ids(self.nursery.name_of(env), split, params)

    def readiness(self) -> dict[str, Any]:
        """`GET /readyz`: whether a create would be taken now, and why not."""
        reason, loaded = "ready", False
        try:
            if self._draining:
                raise _draining()
            self.nursery.refuse_if_not_ready()
            loaded = True  # so that a create would be taken, if perhaps into the line
            if self._slots.taken >= self._slots.limit:
                raise AtCapacity(f"{self._slots.taken} instances live here, which is the limit: creates wait")
            if self._scratch is not None:
                self._scratch.refuse_if_full()
        except Busy as error:
            reason = str(error)
        return {
            "ready": reason == "ready",
            "loaded": loaded,
            "reason": reason,
            "instances": self._slots.taken,
            "limit": self._slots.limit,
            "queue": self._slots.waiting,
            "group_templates": len(self.nursery.groups),
        }

    async def describe(self) -> list[dict[str, Any]]:
        """`GET /instances`. `memory` is in bytes, private to the world."""
        now = time.monotonic()
        lines = [(instance.describe(now), instance.process) for instance in self._instances.values()]

        def add_memory() -> list[dict[str, Any]]:
            return [{**line, "memory": private_memory(process.pid) if process else None} for line, process in lines]

        return await asyncio.to_thread(add_memory)


def _draining() -> Draining:
    return Draining("the server is shutting down")
