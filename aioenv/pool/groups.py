"""Group templates: worlds that rest after their first observation, to be copied for each create of the same task.

Rollouts come in groups of 8 to 64 on one task. The first create of an (env, task, params) makes the group's template,
that create and the following ones fork it. A few are kept; the one not used for longest goes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from aioenv.errors import EnvError, StepTimeout
from aioenv.pool.process import WorkerDied, WorkerProcess
from aioenv.pool.scratch import remove
from aioenv.pool.template import Template

log = logging.getLogger("aioenv.pool")


@dataclass
class Group:
    """One group template: ready when `made` is done, with its process and what `get_init_state` returned."""

    folder: Path
    made: asyncio.Task[tuple[WorkerProcess, Any]]
    used: float = field(default_factory=time.monotonic)

    @property
    def resting(self) -> bool:
        return self.made.done() and not self.made.cancelled() and self.made.exception() is None


class Groups:
    """The group templates of a server, at most `limit` of them."""

    def __init__(self, limit: int, ttl: float, create_timeout: float, confinement: dict[str, Any]) -> None:
        """Both times are in seconds. `confinement` is for the groups' worlds and their copies (confine.py)."""
        self._limit = limit
        self._ttl = ttl
        self._create_timeout = create_timeout
        self._confinement = confinement
        self._groups: OrderedDict[bytes, Group] = OrderedDict()  # the least recently used first
        self._count = 0
        self._endings: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._groups)

    def serves(self, template: Template) -> bool:
        return self._limit > 0 and template.forkable

    async def fork(
        self, template: Template, task_id: str, params: dict[str, Any], name: str, folder: Path, scratch: Path
    ) -> tuple[WorkerProcess, Any]:
        """A copy of the group's world that is about to `wake`, and what `get_init_state` returned.

        Raises what making the group's world raised, to all who wait for it: EnvError and its like, StepTimeout.
        """
        key = orjson.dumps([template.spec.name, task_id, params], option=orjson.OPT_SORT_KEYS)
        for last_try in (False, True):
            group = self._groups.get(key)
            if group is None:
                self._count += 1
                own = scratch / "groups" / str(self._count)
                making = _make(template, task_id, params, own, self._create_timeout, self._confinement)
                made = asyncio.create_task(making)
                group = self._groups[key] = Group(own, made)
                made.add_done_callback(lambda _, key=key, group=group: self._made(key, group))  # type: ignore[misc]
            group.used = time.monotonic()
            self._groups.move_to_end(key)
            # One caller that leaves does not end it for the others.
            process, initial = await asyncio.shield(group.made)
            try:
                return await process.fork(name, folder, self._confinement), initial
            except WorkerDied as death:
                if last_try:
                    raise
                log.warning("the group template of task %s is gone (%s); making another", task_id, death)
                self._drop(key, group)
        raise AssertionError("unreachable")

    def _made(self, key: bytes, group: Group) -> None:
        if not group.resting:
            self._drop(key, group)
            return
        process = group.made.result()[0]
        process.ended.add_done_callback(lambda _: self._drop(key, group))
        for other, oldest in list(self._groups.items()):
            if len(self._groups) <= self._limit:
                break
            if oldest.resting and oldest is not group:
                self._drop(other, oldest)

    def drop_idle(self, now: float) -> None:
        """Those not used for longer than their time to live go."""
        for key, group in list(self._groups.items()):
            if group.resting and now - group.used >= self._ttl:
                self._drop(key, group)

    def _drop(self, key: bytes, group: Group) -> None:
        if self._groups.get(key) is group:
            del self._groups[key]
            task = asyncio.create_task(_end(group))
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    async def close(self) -> None:
        for key, group in list(self._groups.items()):
            group.made.cancel()
            self._drop(key, group)
        while self._endings:
            await asyncio.wait(self._endings)


async def _make(
    template: Template,
    task_id: str,
    params: dict[str, Any],
    folder: Path,
    limit: float,
    confinement: dict[str, Any],
) -> tuple[WorkerProcess, Any]:
    folder.mkdir(parents=True)
    process = await template.fork(f"the group template of task {task_id}", folder, confinement)
    try:
        async with asyncio.timeout(limit):
            initial = await process.call("create", instance_id="group-template", task_id=task_id, params=params)
            await process.call("rest")
    except BaseException as error:
        process.kill("it could not be made")
        if isinstance(error, TimeoutError):
            raise StepTimeout(f"create passed its {limit:g} s limit; the world was killed") from None
        if isinstance(error, WorkerDied):
            raise EnvError(f"the world died while it was created: {error}") from None
        raise
    process.bears_children = True
    return process, initial


async def _end(group: Group) -> None:
    await asyncio.wait([group.made])
    if group.resting:
        process = group.made.result()[0]
        process.kill("it is not needed any more")
        await process.ended
    await asyncio.to_thread(remove, group.folder)
