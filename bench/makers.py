"""The ways to make an AppWorld world that create.py compares: a fresh process, and a server's forks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common import fenced
from processes import Served, pss, serving, tree
from rawhttp import BlockingClient
from stock import Stock


@dataclass(frozen=True)
class World:
    """One that lives. `seconds` is from asking for it to having its initial state; `pid` is 0 where it is not known."""

    seconds: float
    pid: int
    step: Callable[[str], object]
    end: Callable[[], object]


class Maker(Protocol):
    """Makes worlds, all of `tasks` at once."""

    def make(self, tasks: Sequence[str]) -> list[World]: ...

    def memory(self) -> int:
        """Bytes of all its processes, what they share counted once."""


class FreshProcesses:
    """A new interpreter for each world, which imports AppWorld and makes it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._alive: dict[int, Stock] = {}

    def make(self, tasks: Sequence[str]) -> list[World]:
        with ThreadPoolExecutor(len(tasks)) as threads:
            return list(threads.map(self._make, tasks))

    def _make(self, task_id: str) -> World:
        began = time.perf_counter()
        stock = Stock(self._root, task_id)
        self._alive[stock.pid] = stock
        stock.ready()
        took = time.perf_counter() - began
        return World(took, stock.pid, lambda code: stock.call("step", code=code), lambda: self._end(stock))

    def _end(self, stock: Stock) -> None:
        with stock:
            del self._alive[stock.pid]

    def memory(self) -> int:
        return pss(pid for alive in self._alive for pid in tree(alive))

    def close(self) -> None:
        for stock in list(self._alive.values()):
            self._end(stock)


class Service:
    """A server's worlds."""

    def __init__(self, served: Served, clients: Sequence[BlockingClient]) -> None:
        self._served = served
        self._clients = clients

    def make(self, tasks: Sequence[str]) -> list[World]:
        before = set(tree(self._served.pid))
        if len(tasks) == 1:
            instance_id, took = self._create(self._clients[0], tasks[0])
            # A new group's template has the world as its child: the world is the one without.
            new = [pid for pid in tree(self._served.pid) if pid not in before and len(tree(pid)) == 1]
            return [self._world(instance_id, took, new[0] if len(new) == 1 else 0)]
        assert len(tasks) <= len(self._clients)
        with ThreadPoolExecutor(len(tasks)) as threads:
            made = list(threads.map(self._create, self._clients, tasks))
        return [self._world(instance_id, took, 0) for instance_id, took in made]

    def _create(self, client: BlockingClient, task_id: str) -> tuple[str, float]:
        began = time.perf_counter()
        reply = client.call("create", env_type="appworld", task_id=task_id)
        return reply["info"]["instance_id"], time.perf_counter() - began

    def _world(self, instance_id: str, took: float, pid: int) -> World:
        client = self._clients[0]
        return World(
            took,
            pid,
            lambda code: client.call("step", instance_id=instance_id, messages=fenced(code)),
            lambda: client.call("release", instance_id=instance_id),
        )

    def memory(self) -> int:
        return pss(tree(self._served.pid))


@contextlib.contextmanager
def fresh_processes(root: Path) -> Iterator[FreshProcesses]:
    maker = FreshProcesses(root)
    try:
        yield maker
    finally:
        maker.close()


@contextlib.contextmanager
def service(root: Path, at_once: int, *options: str) -> Iterator[Service]:
    """A server with `options`, and connections for so many creates at once."""
    with serving("--env", "appworld", "--root", str(root), *options) as served, contextlib.ExitStack() as stack:
        yield Service(served, [stack.enter_context(BlockingClient(served.url)) for _ in range(at_once)])
