"""One instance: its world's process, its life, and its calls, one at a time in the order they came."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import orjson

from aioenv.config import Limits
from aioenv.errors import AioenvError, BadRequest, EnvError, InstanceGone, InternalError, StepTimeout
from aioenv.pool import replies
from aioenv.pool.answer import NoAnswer, Unread
from aioenv.pool.jobs import Jobs
from aioenv.pool.process import WorkerDied, WorkerProcess
from aioenv.pool.replay import Replays, Reply
from aioenv.pool.state import Lifecycle, State
from aioenv.pool.worldlog import last_words

log = logging.getLogger("aioenv.pool")

# Seconds that an env's `close` may take before its world is killed.
CLOSE_GRACE = 5.0

T = TypeVar("T")
Messages = dict[str, Any] | bytes  # bytes are JSON already


class Instance:
    """Made by `Pool.create`. `call` is for the routes, through the pool."""

    def __init__(
        self,
        instance_id: str,
        env: str,
        task_id: str,
        params: dict[str, Any],
        limits: Limits,
        bodies: Jobs,
        request_id: str | None = None,
    ) -> None:
        """`bodies` reads what is large. `request_id` is that of its create."""
        self.id = instance_id
        self.env = env
        self.task_id = task_id
        self.params = params
        self.request_id = request_id
        self.folder: Path | None = None
        self.life = Lifecycle(instance_id)
        self.process: WorkerProcess | None = None
        self.steps = 0
        self.call_in_flight: str | None = None
        self.created_at = self.last_used = self.call_began = time.monotonic()
        # The first reply: asked for again by a create with the same id.
        self.initial: asyncio.Future[Reply] | None = None
        self.branch_of: str | None = None  # the instance that it is a copy of
        # Set when process and folder are gone.
        self.gone = asyncio.Event()
        self.holds_slot = False
        self.died = False  # by itself, or killed for what it did: nobody asked for its end
        self.released_by: str | None = None
        self.replays = Replays()
        # Whether the client of a create that waits here is there no more, one for each.
        self.hung_up: list[Callable[[], bool]] = []
        self._limits = limits
        self._bodies = bodies
        self._last_words: asyncio.Task[str] | None = None
        # Held by the call that runs; wakes its waiters in the order they came.
        self.turn = asyncio.Lock()

    @property
    def has_lived(self) -> bool:
        """Its creation succeeded, so that a caller may know of it."""
        initial = self.initial
        return initial is not None and initial.done() and not initial.cancelled() and initial.exception() is None

    @property
    def abandoned(self) -> bool:
        """Nobody waits for its creation any more."""
        return all(gone() for gone in self.hung_up)

    def same_as(self, env: str, task_id: str, params: dict[str, Any]) -> bool:
        # Compared as JSON, where 1, 1.0 and true are not the same. A branch has no first state of its own.
        return self.branch_of is None and (self.env, self.task_id, _json(self.params)) == (env, task_id, _json(params))

    # -- calls -------------------------------------------------------------------------------------------------------

    async def begin(self, process: WorkerProcess, initial: Any) -> Reply:
        """Make the world in `process`, or wake it there if `initial` is what it observes; the first reply.

        Raises what the env raised, InstanceGone, StepTimeout.
        """
        self.process = process
        limit = self._limits.create_timeout
        if initial is None:
            made = process.call("create", instance_id=self.id, task_id=self.task_id, params=self.params)
            initial = await self.within(limit, "create", made)
        else:
            await self.within(limit, "create", process.call("wake", instance_id=self.id))
        reply = await self._shape(replies.initial_reply, initial, self.id, self.task_id)
        self.life.to(State.READY)
        self.last_used = time.monotonic()
        return reply

    async def wake(self, steps: int) -> None:
        """As `begin`, for a copy of an instance that had taken `steps`. Raises what the env raised, InstanceGone."""
        assert self.process is not None
        await self.within(self._limits.create_timeout, "fork", self.process.call("wake", instance_id=self.id))
        self.steps = steps

    def raise_if_dead(self) -> None:
        """For a copy that woke, maybe a while ago. Raises InstanceGone."""
        if self.life.state is not State.STARTING:
            raise self.gone_error()

    def has_begun(self) -> None:
        """A copy takes calls from here on."""
        self.life.to(State.READY)
        self.last_used = time.monotonic()
        assert self.initial is not None
        self.initial.set_result(Reply(b"null"))

    async def call(self, op: str, messages: Messages, params: dict[str, Any], request_id: str | None = None) -> Reply:
        """`step`, `evaluate` or `get_info`. With a `request_id` it is run once, and asked for as often as one likes.

        Raises BadRequest, EnvError, InstanceGone, StepTimeout, InstanceConflict (an id used for something else),
        InternalError.
        """
        if request_id is None:
            return await self._call(op, messages, params)
        return await self.once(request_id, call_print(op, messages, params), lambda: self._call(op, messages, params))

    async def once(self, request_id: str | None, what: int, run: Callable[[], Awaitable[Reply]]) -> Reply:
        """What `run` gives, or gave for the same `request_id` before; `what` tells calls apart."""
        if request_id is None:
            return await run()
        before = self.replays.find(request_id)
        if before is not None:
            return await before.again(request_id, what)
        self.replays.begin(request_id, what)
        outcome: Reply | AioenvError = InternalError(f"the call on instance {self.id} was broken off")
        try:
            outcome = await run()
            return outcome
        except AioenvError as error:
            outcome = error
            raise
        finally:
            self.replays.finish(request_id, outcome)

    async def _call(self, op: str, messages: Messages, params: dict[str, Any]) -> Reply:
        limit = self._limit(op, params)
        asked = time.monotonic()
        if self.initial is not None and not self.initial.done():
            await asyncio.wait([self.initial])
        async with self.turn:  # not `hold`, which costs each step more
            process = self._begin_call(op) or await self._raise_gone()
            queued = self.call_began - asked
            try:
                data = await self.within(limit, op, process.call(op, messages=messages, params=params))
            except EnvError as error:
                self._count(op)  # the world was given the action, whatever came of it
                self._log_raised(op, error)
                raise
            finally:
                self._end_call()
            step = self._count(op)
        ran = self.last_used - self.call_began
        try:
            if op != "step":
                reply = await self._shape(replies.score if op == "evaluate" else replies.any_data, data)
            elif isinstance(data, Unread):
                reply = await self._shape(replies.step_reply, data, self.id, self.task_id, step)
            else:
                reply = replies.step_reply(data, self.id, self.task_id, step)
        except EnvError as error:
            self._log_raised(op, error)
            raise
        reply.queued, reply.ran = queued, ran
        return reply

    @contextlib.asynccontextmanager
    async def hold(self, op: str) -> AsyncIterator[WorkerProcess]:
        """Its process, when all calls that came before have ended, and for nobody else. Raises InstanceGone."""
        if self.initial is not None and not self.initial.done():
            await asyncio.wait([self.initial])
        async with self.turn:
            process = self._begin_call(op) or await self._raise_gone()
            try:
                yield process
            finally:
                self._end_call()

    def _begin_call(self, op: str) -> WorkerProcess | None:
        """By who has the turn; None where it takes no calls any more."""
        if not self.life.takes_calls:
            return None
        self.life.to(State.BUSY)
        self.call_in_flight = op
        self.call_began = time.monotonic()
        return self.process

    async def _raise_gone(self) -> NoReturn:
        if self.died:
            await self.last_words()
        raise self.gone_error()

    def _end_call(self) -> None:
        self.call_in_flight = None
        self.last_used = time.monotonic()
        if self.life.state is State.BUSY:
            self.life.to(State.READY)

    def _limit(self, op: str, params: dict[str, Any]) -> float:
        """Seconds. A step may ask for less than the server's limit."""
        if op != "step":
            return self._limits.evaluate_timeout
        wanted = params.get("timeout")
        if wanted is None:
            return self._limits.step_timeout
        if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not 0 < wanted < math.inf:
            raise BadRequest(f'"params.timeout" must be a number of seconds over 0, not {wanted!r:.100}')
        return min(float(wanted), self._limits.step_timeout)

    def _count(self, op: str) -> int:
        self.steps += op == "step"
        return self.steps

    def _log_raised(self, op: str, error: EnvError) -> None:
        log.warning("instance %s (%s, task %s): %s raised: %s", self.id, self.env, self.task_id, op, last_line(error))

    async def _shape(self, shape: replies.Shape, data: Any, *args: Any) -> Reply:
        """The reply, by a job where the answer is large."""
        if not isinstance(data, Unread):
            return shape(data, *args)
        try:
            reply: Reply = await self._bodies.run(replies.shape_job, shape, data.body, *args)
        except NoAnswer as error:
            cause = f"its process wrote what is no answer to its pipe ({error})"
            assert self.process is not None
            self.process.kill(cause)
            raise InstanceGone(f"instance {self.id} is gone: {cause}") from None
        return reply

    async def within(self, limit: float, op: str, call: Awaitable[T]) -> T:
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
            words = await self.last_words()
            # This very call's limit, not that of one before it which is still being cleared away.
            if str(death) == expired and loop.time() >= timer.when():
                raise StepTimeout(f"{expired}; instance {self.id} was killed{words}") from None
            raise InstanceGone(f"instance {self.id} is gone: {death}{words}") from None
        finally:
            timer.cancel()

    # -- ending ------------------------------------------------------------------------------------------------------

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

    async def last_words(self) -> str:
        """For a world that died: the end of what it printed, as the end of a message; empty if there is nothing."""
        if self._last_words is None:
            self._last_words = asyncio.create_task(asyncio.to_thread(last_words, self.folder))
        return await asyncio.shield(self._last_words)

    @property
    def cause(self) -> str:
        """Why it ended, or is about to, and its last words as far as they are known."""
        return f"{self.life.cause}{self.words_so_far}"

    @property
    def words_so_far(self) -> str:
        task = self._last_words
        return task.result() if task is not None and task.done() else ""

    def gone_error(self) -> InstanceGone:
        return InstanceGone(f"instance {self.id} is gone: {self.cause}")

    def describe(self, now: float) -> dict[str, Any]:
        """One line of `GET /instances`, but for the memory. Times are in seconds."""
        idle = self.idle_for(now)
        return {
            "instance_id": self.id,
            "env": self.env,
            "task_id": self.task_id,
            "state": self.life.state.value,
            "queued": self.life.state is State.STARTING and not self.holds_slot,
            "steps": self.steps,
            "age": round(now - self.created_at, 3),
            "idle": None if idle is None else round(idle, 3),
            "call": self.call_in_flight,
            "history": [[round(seconds, 3), state.value] for seconds, state in self.life.history],
        }


def last_line(error: BaseException) -> str:
    """Of a traceback: the exception itself, shortened."""
    lines = [line for line in str(error).splitlines() if line and line[0] not in " +|"]  # but for a group's branches
    return lines[-1][:300] if lines else ""


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def call_print(op: str, messages: Messages, params: dict[str, Any]) -> int:
    """Tells calls apart. Of a large body's messages only that they are: to look at them takes too long here."""
    return hash((op, _json([messages if isinstance(messages, dict) else None, params])))
