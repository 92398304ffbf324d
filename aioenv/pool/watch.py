"""Looks at what worlds use, where the kernel has no limit for a world, and ends those that use too much.

Memory and processes are looked at several times a second while a world is at work, the disk every few seconds or when
it fills up quickly. What a world takes in between is bounded by confine.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aioenv import linux
from aioenv.config import MIB, Limits
from aioenv.errors import AioenvError
from aioenv.pool import jobs, worldlog
from aioenv.pool.pool import Pool
from aioenv.pool.state import State
from aioenv.pool.worker import home_of

log = logging.getLogger("aioenv.pool")

# Seconds between two looks at worlds that are at work; every so many of them is at all worlds.
LOOK_INTERVAL = 0.25
ALL_EVERY = 20
# Seconds between two looks at the disk.
DISK_INTERVAL = 10.0
_DISK_JOB_LIMIT = 120.0


@dataclass(frozen=True)
class World:
    """What is looked at: `measure_from` are the bytes in memory from which on its own share is worth finding out."""

    pid: int
    folder: Path
    measure_from: int


@dataclass(frozen=True)
class Usage:
    """Of a world's processes together. `memory` is their own in bytes, None where it need not be known."""

    processes: int
    resident: int
    memory: int | None


def excess(usage: Usage, limits: Limits) -> str | None:
    """Why a world has to end, as its cause; None if it need not."""
    if usage.processes > limits.processes:
        return f"over its limit of {limits.processes} processes"
    if limits.memory is not None and usage.memory is not None and usage.memory > limits.memory:
        return f"over its {limits.memory / MIB:g} MiB memory limit"
    return None


def largest_first(sizes: dict[str, int], total: int, limit: int) -> list[str]:
    """Whom to end so that the `total` comes down to `limit`: as few as possible."""
    chosen = []
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if total <= limit:
            break
        chosen.append(name)
        total -= sizes[name]
    return chosen


class Watch:
    """`run` it for as long as the pool lives."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._limits = pool.settings.limits
        self._disk = jobs.Jobs(workers=1)
        self._measure_from: dict[str, int] = {}
        self._looks = 0
        self._disk_seen = time.monotonic()
        self._free = _free(pool.scratch)

    async def run(self) -> None:
        """Ends by being cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_repeat(self._look_at_processes, "what worlds use"))
                group.create_task(_repeat(self._look_at_disk, "the disk"))
        finally:
            await self._disk.close()

    # -- memory and processes ----------------------------------------------------------------------------------------

    async def _look_at_processes(self) -> None:
        self._looks += 1
        everyone = self._looks % ALL_EVERY == 0
        worlds = dict(self._worlds(everyone))
        if everyone:
            self._measure_from.clear()  # of the living it is found out anew
        if worlds:
            root, known = self._pool.family()
            usages = await asyncio.to_thread(look_at, worlds, root, known, self._limits)
            for instance_id, usage in usages.items():
                self._judge(instance_id, worlds[instance_id].pid, usage)

    def _worlds(self, everyone: bool) -> Iterable[tuple[str, World]]:
        now = time.monotonic()
        for instance in self._pool.living():
            process, folder = instance.process, instance.folder
            at_work = instance.life.state is not State.READY and now - instance.call_began >= LOOK_INTERVAL
            if process is not None and folder is not None and (everyone or at_work):
                known = 0 if everyone else self._measure_from.get(instance.id, 0)
                yield instance.id, World(process.pid, folder, max(known, self._limits.memory or 0))

    def _judge(self, instance_id: str, pid: int, usage: Usage) -> None:
        cause = excess(usage, self._limits)
        if cause is not None:
            self._pool.kill(instance_id, pid, cause)
        elif usage.memory is not None and self._limits.memory is not None:
            # It has to grow before it can be over. But for what it shares and changes: that is looked at with all.
            self._measure_from[instance_id] = usage.resident + (self._limits.memory - usage.memory) // 2

    # -- disk --------------------------------------------------------------------------------------------------------

    async def _look_at_disk(self) -> None:
        now, free = time.monotonic(), _free(self._pool.scratch)
        filling_up = self._free - free >= min(self._limits.disk, self._pool.scratch_limit) // 4
        living = [instance for instance in self._pool.living() if instance.folder is not None]
        if not living or (now - self._disk_seen < DISK_INTERVAL and not filling_up):
            return
        pids = {
            instance.folder.name: instance.process.pid for instance in living if instance.folder and instance.process
        }
        sizes = await self._disk.run(disk_job, str(self._pool.scratch), pids, limit=_DISK_JOB_LIMIT)
        self._disk_seen, self._free = now, free
        self._judge_disk(sizes, pids)

    def _judge_disk(self, sizes: dict[str, int], pids: dict[str, int]) -> None:
        ids = {instance.folder.name: instance.id for instance in self._pool.living() if instance.folder is not None}
        worlds = {name: size for name, size in sizes.items() if name in ids and name in pids}
        total, limit = sum(sizes.values()), self._pool.scratch_limit
        for name, size in worlds.items():
            if size > self._limits.disk:
                self._pool.kill(ids[name], pids[name], f"over its {self._limits.disk / MIB:g} MiB disk limit")
        why_full = None
        if total > limit:
            why_full = f"the instances' folders take {total / MIB:.0f} MiB, over their limit of {limit / MIB:.0f} MiB"
            log.error("%s: no more creates, and the largest instances go", why_full)
            for name in largest_first(worlds, total, limit):
                taken = worlds[name] / MIB
                self._pool.kill(ids[name], pids[name], f"the largest, with {taken:.0f} MiB on disk, when {why_full}")
        self._pool.set_full(why_full)


async def _repeat(look: Callable[[], Awaitable[None]], what: str) -> None:
    while True:
        await asyncio.sleep(LOOK_INTERVAL)
        try:
            await look()
        except AioenvError as error:
            log.warning("a look at %s failed (%s); the next one is in %g s", what, error, LOOK_INTERVAL)
        except Exception:
            log.exception("a look at %s failed; the next one is in %g s", what, LOOK_INTERVAL)


def look_at(worlds: dict[str, World], root: int, known: set[int], limits: Limits) -> dict[str, Usage]:
    """What each world uses, by its id. To be run in a thread. `known` are the pids that are no strays of a world's."""
    strays: dict[str, list[int]] = {}
    for pid in set(linux.children_of(root)) - known:
        strays.setdefault(home_of(pid) or "", []).append(pid)
    usages = {}
    for name, world in worlds.items():
        if worldlog.cut(world.folder):
            log.warning("the log of instance %s was over its limit and is cut to its end", name)
        pids = [world.pid]
        for pid in (world.pid, *strays.get(str(world.folder), ())):
            pids += [pid, *linux.descendants_of(pid)]
        resident, memory = 0, None
        if limits.memory is not None:
            resident = sum(linux.resident_memory(pid) or 0 for pid in set(pids))
            if resident > world.measure_from:
                memory = sum(linux.private_memory(pid) or 0 for pid in set(pids))
        count = len(set(pids))
        if count > limits.processes:  # but for those that have ended, if nobody has reaped them
            count = sum(bool(linux.resident_memory(pid)) for pid in set(pids))
        usages[name] = Usage(count, resident, memory)
    return usages


def disk_job(scratch: str, pids: dict[str, int]) -> dict[str, Any]:
    """Job: bytes on disk in each folder of worlds, groups and templates, by the folder's name.

    `pids` are the processes in folders of worlds: what they hold open and have removed takes room, too.
    """

    def act() -> dict[str, int]:
        sizes = {}
        for kind in os.scandir(scratch):
            if kind.is_dir(follow_symlinks=False):
                for folder in os.scandir(kind):
                    # The names of groups and templates are not to be taken for those of worlds.
                    name = folder.name if kind.name == "worlds" else f"{kind.name}/{folder.name}"
                    sizes[name] = _size(folder.path)
        for name, pid in pids.items():
            if name in sizes:
                sizes[name] += sum(map(_removed_but_open, (pid, *linux.descendants_of(pid))))
        return sizes

    return jobs.answered(act)


def _size(folder: str) -> int:
    total, folders = 0, [folder]
    while folders:
        inside = folders.pop()
        try:
            with os.scandir(inside) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    total += found.st_blocks * 512
                    if stat.S_ISDIR(found.st_mode):
                        folders.append(entry.path)
        except OSError:
            pass  # it is being removed, or its world has made it so
    return total


def _removed_but_open(pid: int) -> int:
    total = 0
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            found = os.stat(f"/proc/{pid}/fd/{fd}")
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                total += found.st_blocks * 512
    except OSError:
        pass  # it ended, or closed one
    return total


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
