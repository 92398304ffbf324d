"""Branching live worlds: copies of an instance as it stands (`fork`), and as it stood (`checkpoint`, `restore`).

A fork copies all that a world has in memory; its folder is copied, too. The source is paused meanwhile, between two
calls, and goes on as if nothing had been. A checkpoint is such a copy that sleeps, to be copied itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from aioenv.errors import AioenvError, BadRequest, EnvError, InstanceConflict, InstanceGone, InternalError, StepTimeout
from aioenv.pool.instance import Instance
from aioenv.pool.process import WorkerDied, WorkerProcess
from aioenv.pool.replay import Reply
from aioenv.pool.scratch import copy_folder, remove

if TYPE_CHECKING:
    from aioenv.pool.pool import Pool

log = logging.getLogger("aioenv.pool")

# Seconds that an env may take to get ready for a fork, and to go on after it.
PAUSE_LIMIT = 20.0
# Of one instance.
MOST_CHECKPOINTS = 32
MOST_BRANCHES = 64


@dataclass
class Checkpoint:
    """A sleeping copy of an instance. Times are in seconds; `used` is when it was made or last restored."""

    id: str
    instance_id: str
    env: str
    task_id: str
    params: dict[str, Any]
    steps: int
    process: WorkerProcess
    folder: Path
    keep: bool
    ttl: float
    made: float
    used: float

    def describe(self, now: float) -> dict[str, Any]:
        return {
            "checkpoint": self.id,
            "instance_id": self.instance_id,
            "env": self.env,
            "task_id": self.task_id,
            "step": self.steps,
            "keep": self.keep,
            "age": round(now - self.made, 3),
            "expires_in": round(self.ttl - (now - self.used), 3),
        }


class Branches:
    """The branching of a pool's instances, and its checkpoints."""

    def __init__(self, pool: Pool, ttl: float) -> None:
        """`ttl`: seconds that a checkpoint lives after it was made or last restored, if it is not told another."""
        self._pool = pool
        self._ttl = ttl
        self._checkpoints: dict[str, Checkpoint] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._coming: set[Path] = set()  # of copies about to be born, which nobody else knows

    # -- fork --------------------------------------------------------------------------------------------------------

    async def fork(self, source: Instance, ids: list[str]) -> Reply:
        """A copy of `source` for each id; all or none. The reply's data is a list, as the ids go.

        Raises BadRequest (an env that can't be forked), InstanceConflict, AtCapacity, EnvError, InstanceGone.
        """
        self._refuse_if_not_forkable(source.env)
        for name in ids:
            if self._pool.has(name):
                raise InstanceConflict(f"instance {name} exists already")
        branches = [self._pool.new_branch(name, source) for name in ids]
        began = time.monotonic()
        waking: list[asyncio.Task[None]] = []
        try:
            for branch in branches:
                await self._pool.take_slot(branch)
            async with self._paused(source, "fork") as process:
                queued, step = source.call_began - began, source.steps
                for branch in branches:
                    await self._copy(process, source.folder, branch)
                    # While the next is copied, or the source goes on.
                    waking.append(asyncio.create_task(branch.wake(step)))
            try:
                await asyncio.gather(*waking)
                for branch in branches:
                    branch.raise_if_dead()
            except (InstanceGone, StepTimeout) as death:
                # To the caller it never lived, and the source is well.
                raise EnvError(f"a copy of instance {source.id} died before it was there: {death}") from None
        except BaseException as error:
            for task in waking:
                task.cancel()
            await asyncio.gather(*waking, return_exceptions=True)
            await self._pool.end_branches(branches, "it could not be forked")
            raise _told(error, source) from None
        for branch in branches:
            branch.has_begun()
        data = [{"instance_id": branch.id, "task_id": branch.task_id, "step": step} for branch in branches]
        return Reply(orjson.dumps(data), queued, time.monotonic() - began - queued)

    def _refuse_if_not_forkable(self, env: str) -> None:
        if not self._pool.forkable(env):
            raise BadRequest(f"instances of env {env} can't be forked: the env has not opted in (BaseEnv.forkable)")

    @contextlib.asynccontextmanager
    async def _paused(self, source: Instance, op: str) -> AsyncIterator[WorkerProcess]:
        """Between two calls of the source, with its env ready to be copied."""
        async with source.hold(op) as process:
            try:
                await source.within(PAUSE_LIMIT, op, process.call("pause"))
                yield process
            finally:
                if process.takes_calls:
                    try:
                        await source.within(PAUSE_LIMIT, op, process.call("resume"))
                    except EnvError as error:
                        process.kill("its env could not go on after a fork")
                        log.error("instance %s: its env could not go on after a fork: %s", source.id, error)

    async def _copy(self, process: WorkerProcess, folder: Path | None, branch: Instance) -> None:
        branch.folder = self._pool.new_folder(branch.id)
        if folder is not None:
            await asyncio.to_thread(copy_folder, folder, branch.folder)
        self._pool.attach(branch, await self._born(process, f"instance {branch.id}", branch.folder))

    async def _born(self, process: WorkerProcess, name: str, folder: Path) -> WorkerProcess:
        """A copy of `process`, spared by the sweep for strays until it is known."""
        self._coming.add(folder)
        try:
            return await process.fork(name, folder, self._pool.nursery.confinement)
        finally:
            self._coming.discard(folder)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def checkpoint(self, source: Instance, keep: bool, ttl: float | None) -> Reply:
        """A sleeping copy. The reply's data is what `describe` says. Raises as `fork`, and BadRequest for too many."""
        self._refuse_if_not_forkable(source.env)
        if len(self.of(source.id)) >= MOST_CHECKPOINTS:
            raise BadRequest(f"instance {source.id} has {MOST_CHECKPOINTS} checkpoints, which is the limit")
        name = uuid.uuid4().hex
        folder = self._pool.scratch / "checkpoints" / name
        began = time.monotonic()
        await self._pool.take_room()
        try:
            folder.mkdir()
            async with self._paused(source, "checkpoint") as process:
                queued, step = source.call_began - began, source.steps
                if source.folder is not None:
                    await asyncio.to_thread(copy_folder, source.folder, folder)
                copy = await self._born(process, f"checkpoint {name} of {source.id}", folder)
        except BaseException as error:
            self._pool.give_room_back()
            await asyncio.to_thread(remove, folder)
            raise _told(error, source) from None
        now = time.monotonic()
        made = Checkpoint(
            id=name,
            instance_id=source.id,
            env=source.env,
            task_id=source.task_id,
            params=source.params,
            steps=step,
            process=copy,
            folder=folder,
            keep=keep,
            ttl=self._ttl if ttl is None else ttl,
            made=now,
            used=now,
        )
        self._checkpoints[name] = made
        copy.ended.add_done_callback(lambda _: self._drop(made))
        return Reply(orjson.dumps(made.describe(now)), queued, now - began - queued)

    async def restore(self, instance: Instance, name: str | None) -> Reply:
        """Put a living instance back to a checkpoint of its own, its latest if none is named.

        Raises as `find`, and EnvError, InstanceGone.
        """
        checkpoint = self.find(instance.id, name)
        checkpoint.used = began = time.monotonic()
        async with instance.hold("restore"):
            queued = instance.call_began - began
            await self._put_back(instance, checkpoint)
        return _restored(checkpoint, began, queued)

    async def revive(self, branch: Instance, checkpoint: Checkpoint) -> Reply:
        """Let an instance that is gone begin anew, as `branch`. Raises AtCapacity, EnvError, InstanceGone."""
        checkpoint.used = began = time.monotonic()
        try:
            await self._pool.take_slot(branch)
            await self._copy(checkpoint.process, checkpoint.folder, branch)
            await branch.wake(checkpoint.steps)
            branch.raise_if_dead()
        except BaseException as error:
            await self._pool.end_branches([branch], "it could not be restored")
            raise _told(error, branch) from None
        branch.has_begun()
        return _restored(checkpoint, began, 0.0)

    def find(self, instance_id: str, name: str | None) -> Checkpoint:
        """A checkpoint of this instance. Raises BadRequest where it has no such one."""
        own = self.of(instance_id)
        found = [one for one in own if name is None or one.id == name]
        if not found:
            what = "no checkpoint" if name is None else f"no checkpoint {name!r}"
            raise BadRequest(f"instance {instance_id} has {what}; it has: {', '.join(one.id for one in own) or 'none'}")
        return found[-1]

    async def _put_back(self, instance: Instance, checkpoint: Checkpoint) -> None:
        """The copy takes the place of the instance's process when it is awake; until then the instance is as it was."""
        folder = self._pool.new_folder(instance.id, beside=True)
        try:
            await asyncio.to_thread(copy_folder, checkpoint.folder, folder)
            copy = await self._born(checkpoint.process, f"instance {instance.id}", folder)
            try:
                await asyncio.wait_for(copy.call("wake", instance_id=instance.id), PAUSE_LIMIT)
            except BaseException:
                copy.kill("it could not be restored")
                raise
        except BaseException as error:
            await asyncio.to_thread(remove, folder)
            if isinstance(error, WorkerDied | TimeoutError):
                raise InternalError(f"checkpoint {checkpoint.id} could not be copied: {error}") from None
            raise
        old, old_folder = instance.process, instance.folder
        instance.folder, instance.steps = folder, checkpoint.steps
        self._pool.attach(instance, copy)
        assert old is not None
        old.kill("restored to a checkpoint")
        await asyncio.shield(old.ended)
        await self._pool.nursery.sweep()
        if old_folder is not None:
            await asyncio.to_thread(remove, old_folder)

    # -- looking, ending ---------------------------------------------------------------------------------------------

    def of(self, instance_id: str) -> list[Checkpoint]:
        """An instance's checkpoints, the oldest first."""
        return [one for one in self._checkpoints.values() if one.instance_id == instance_id]

    def describe(self) -> list[dict[str, Any]]:
        """`GET /checkpoints`. Times are in seconds."""
        now = time.monotonic()
        return [one.describe(now) for one in self._checkpoints.values()]

    def folders(self) -> Iterable[Path]:
        """Of checkpoints, and of copies about to be born."""
        return [*self._coming, *(one.folder for one in self._checkpoints.values())]

    def instance_ended(self, instance_id: str) -> None:
        for one in self.of(instance_id):
            if not one.keep:
                self._drop(one)

    def drop_old(self, now: float) -> None:
        for one in list(self._checkpoints.values()):
            if now - one.used >= one.ttl:
                self._drop(one)

    def _drop(self, checkpoint: Checkpoint) -> None:
        if self._checkpoints.pop(checkpoint.id, None) is not None:
            task = asyncio.create_task(self._end(checkpoint))
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    async def _end(self, checkpoint: Checkpoint) -> None:
        checkpoint.process.kill("the checkpoint is not needed any more")
        await asyncio.shield(checkpoint.process.ended)
        self._pool.give_room_back()
        await asyncio.to_thread(remove, checkpoint.folder)

    async def close(self) -> None:
        for one in list(self._checkpoints.values()):
            self._drop(one)
        while self._endings:
            await asyncio.wait(self._endings)


def _restored(checkpoint: Checkpoint, began: float, queued: float) -> Reply:
    data = {"instance_id": checkpoint.instance_id, "checkpoint": checkpoint.id, "step": checkpoint.steps}
    return Reply(orjson.dumps(data), queued, time.monotonic() - began - queued)


def _told(error: BaseException, source: Instance) -> BaseException:
    if isinstance(error, WorkerDied):
        return InstanceGone(f"instance {source.id} is gone: {error}")
    if isinstance(error, AioenvError | asyncio.CancelledError):
        return error
    log.error("instance %s could not be copied", source.id, exc_info=error)
    return InternalError(f"instance {source.id} could not be copied: {error!r}")
