"""One instance: its world's process, its life, and its calls, one at a time in the order they came."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import orjson

from aioenv.config import Limits
from aioenv.errors import EnvError, InstanceGone, StepTimeout
from aioenv.pool import replies
from aioenv.pool.process import WorkerDied, WorkerProcess
from aioenv.pool.state import Lifecycle, State

log = logging.getLogger("aioenv.pool")

# Seconds that an env's `close` may take before its world is killed.
CLOSE_GRACE = 5.0

T = TypeVar("T")


class Instance:
    """Made by `Pool.create`. `call` and `close` are for the routes, through the pool."""

    def __init__(self, instance_id: str, env: str, task_id: str, params: dict[str, Any], limits: Limits) -> None:
        self.id = instance_id
        self.env = env
        self.task_id = task_id
        self.params = params
        self.folder: Path | None = None
        self.life = Lifecycle(instance_id)
        self.process: WorkerProcess | None = None
        self.steps = 0
        self.call_in_flight: str | None = None
        self.created_at = self.last_used = time.monotonic()
        # The first reply: asked for again by a create with the same id.
        self.initial: asyncio.Task[dict[str, Any]] | None = None
        # Set when process and folder are gone.
        self.gone = asyncio.Event()
        self._limits = limits
        # Held by the call that runs; wakes its waiters in the order they came.
        self.turn = asyncio.Lock()

    @property
    def has_lived(self) -> bool:
        """Its creation succeeded, so that a caller may know of it."""
        return self.initial is not None and self.initial.done() and self.initial.exception() is None

    def same_as(self, env: str, task_id: str, params: dict[str, Any]) -> bool:
        # Compared as JSON, where 1, 1.0 and true are not the same.
        return (self.env, self.task_id, _json(self.params)) == (env, task_id, _json(params))

    async def begin(self, process: WorkerProcess, initial: Any) -> dict[str, Any]:
        """Make the world in `process`, or wake it there if `initial` is what it observes; the first reply.

        Raises what the env raised, InstanceGone, StepTimeout.
        """
        self.process = process
        limit = self._limits.create_timeout
        if initial is None:
            fields = {"instance_id": self.id, "task_id": self.task_id, "params": self.params}
            initial = await self._within(limit, "create", process.call("create", **fields))
        else:
            await self._within(limit, "create", process.call("wake", instance_id=self.id))
        reply = replies.initial_reply(initial, self.id, self.task_id)
        self.life.to(State.READY)
        self.last_used = time.monotonic()
        return reply

    async def step(self, messages: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        try:
            data = await self._call("step", self._limits.step_timeout, messages, params)
        except EnvError as error:
            self.steps += 1  # the world was given the action, whatever came of it
            self._log_raised("step", error)
            raise
        self.steps += 1
        return replies.step_reply(data, self.id, self.task_id, self.steps)

    async def evaluate(self, messages: dict[str, Any], params: dict[str, Any]) -> float:
        try:
            return replies.score(await self._call("evaluate", self._limits.evaluate_timeout, messages, params))
        except EnvError as error:
            self._log_raised("evaluate", error)
            raise

    def _log_raised(self, op: str, error: EnvError) -> None:
        log.warning("instance %s (%s, task %s): %s raised: %s", self.id, self.env, self.task_id, op, last_line(error))

    async def get_info(self, messages: dict[str, Any], params: dict[str, Any]) -> Any:
        return await self._call("get_info", self._limits.evaluate_timeout, messages, params)

    async def _call(self, op: str, limit: float, messages: dict[str, Any], params: dict[str, Any]) -> Any:
        if self.initial is not None and not self.initial.done():
            await asyncio.wait([self.initial])
        async with self.turn:
            if not self.life.takes_calls or self.process is None:
                raise self.gone_error()
            self.life.to(State.BUSY)
            self.call_in_flight = op
            try:
                return await self._within(limit, op, self.process.call(op, messages=messages, params=params))
            finally:
                self.call_in_flight = None
                self.last_used = time.monotonic()
                if self.life.state is State.BUSY:
                    self.life.to(State.READY)

    async def _within(self, limit: float, op: str, call: Awaitable[T]) -> T:
        """Wait for a call; kill the world when it passes its limit, or when nobody waits any more."""
        assert self.process is not None
        # Not `asyncio.timeout`: killing the world ends the call, so there is nothing to cancel, and this costs less.
        expired = f"{op} passed its {limit:g} s limit"
        loop = asyncio.get_running_loop()
        timer = loop.call_later(limit, self.process.kill, expired)
        try:
            return await call
        except asyncio.CancelledError:
            # The answer would be taken for that of the next call.
            self.process.kill(f"{op} was cancelled")
            raise
        except WorkerDied as death:
            # This very call's limit, not that of one before it which is still being cleared away.
            if str(death) == expired and loop.time() >= timer.when():
                raise StepTimeout(f"{expired}; instance {self.id} was killed") from None
            raise InstanceGone(f"instance {self.id} is gone: {death}") from None
        finally:
            timer.cancel()

    def idle_for(self, now: float) -> float | None:
        """Seconds without a call, running or waiting; None for an instance that is busy, starting or closing."""
        if self.life.state is not State.READY or self.turn.locked():
            return None
        return now - self.last_used

    def start_closing(self, cause: str) -> None:
        """From here on no call is accepted. The running one ends first; those that wait are told that it is gone."""
        self.life.to(State.CLOSING, cause)

    async def end_process(self, keep: bool) -> None:
        """Let the env close, and save what it has put off if it is to `keep`, within a grace; then kill.

        Waits for the running call.
        """
        async with self.turn:
            if self.process is None or self.process.ended.done():
                return
            try:
                async with asyncio.timeout(CLOSE_GRACE):
                    await self.process.call("close", keep=keep)
            except TimeoutError:
                log.warning("instance %s: its env's close took over %g s; killed", self.id, CLOSE_GRACE)
            except EnvError as error:
                log.warning("instance %s: its env's close failed: %s", self.id, error)
            except WorkerDied:
                pass
            self.process.kill(self.life.cause or "closed")
            await asyncio.shield(self.process.ended)

    @property
    def process_cause(self) -> str:
        """Why its process ended, or will have."""
        ended = self.process.ended if self.process else None
        return ended.result() if ended is not None and ended.done() else self.life.cause or "unknown"

    def gone_error(self) -> InstanceGone:
        return InstanceGone(f"instance {self.id} is gone: {self.life.cause}")

    def describe(self, now: float) -> dict[str, Any]:
        """One line of `GET /instances`, but for the memory. Times are in seconds."""
        idle = self.idle_for(now)
        return {
            "instance_id": self.id,
            "env": self.env,
            "task_id": self.task_id,
            "state": self.life.state.value,
            "steps": self.steps,
            "age": round(now - self.created_at, 3),
            "idle": None if idle is None else round(idle, 3),
            "call": self.call_in_flight,
        }


def last_line(error: Exception) -> str:
    """Of a traceback: the exception itself."""
    return str(error).strip().rpartition("\n")[2]


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
