"""Work for other processes, in a ProcessPoolExecutor: env code that needs no live world (preparing, task lists), and
what would hold up the event loop (large bodies, looking through folders).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from aioenv.envs.registry import EnvSpec
from aioenv.errors import AioenvError, BadRequest, EnvError, InternalError, TooLarge, UnknownTask
from aioenv.linux import die_with_parent
from aioenv.pool.answer import NoAnswer

log = logging.getLogger("aioenv.pool")

WORKERS = 2

_ERRORS: dict[str, type[AioenvError]] = {
    error.code: error for error in (BadRequest, TooLarge, UnknownTask, EnvError, NoAnswer)
}

Job = Callable[..., dict[str, Any]]


class Jobs:
    """`run` a module-level function in another process. A broken executor is replaced."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._workers = workers
        self._executor: ProcessPoolExecutor | None = None

    async def run(self, job: Job, *args: Any, limit: float | None = None) -> Any:
        """The job's data. It may run twice, where another job broke the executor under it.

        Raises BadRequest, TooLarge or EnvError as the job did; InternalError where its process died, or passed the
        `limit` of seconds and was killed.
        """
        try:
            return await self._run_in(self._executor or self._start(), limit, job, *args)
        except BrokenProcessPool:
            # Under which of its jobs a process died can't be told. Alone, each meets only its own fate.
            own = _executor(1)
            try:
                return await self._run_in(own, limit, job, *args)
            except BrokenProcessPool:
                raise InternalError(f"the process of job {job.__name__} died, twice") from None
            finally:
                _end(own)

    async def _run_in(self, executor: ProcessPoolExecutor, limit: float | None, job: Job, *args: Any) -> Any:
        try:
            async with asyncio.timeout(limit):
                answer = await _submit(executor, job, *args)
        except (TimeoutError, BrokenProcessPool) as error:
            if self._executor is executor:
                log.warning("the jobs executor is replaced, as %s %s", job.__name__, error or "passed its limit")
                self._executor = None
            _end(executor)
            if isinstance(error, TimeoutError):
                raise InternalError(f"job {job.__name__} passed its {limit:g} s limit") from None
            raise
        if "error" in answer:
            code, message = answer["error"]
            raise _ERRORS.get(code, EnvError)(message)
        return answer["data"]

    def _start(self) -> ProcessPoolExecutor:
        self._executor = _executor(self._workers)
        return self._executor

    async def close(self) -> None:
        if self._executor is not None:
            executor, self._executor = self._executor, None
            _kill(executor)
            await asyncio.to_thread(executor.shutdown, wait=True)


def _executor(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers,
        # Not fork: the server has threads and sockets.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(),),
    )


def _end(executor: ProcessPoolExecutor) -> None:
    """Kill its processes: what else runs in it gets BrokenProcessPool."""
    _kill(executor)
    executor.shutdown(wait=False)


def _kill(executor: ProcessPoolExecutor) -> None:
    for process in list((executor._processes or {}).values()):
        process.kill()


async def _submit(executor: ProcessPoolExecutor, job: Job, *args: Any) -> dict[str, Any]:
    # Processes are started here. Ctrl-C at the terminal is for the server alone, from their first moment on.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        future = executor.submit(job, *args)
    except RuntimeError as error:  # shut down meanwhile, for another job that failed
        raise BrokenProcessPool(str(error)) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return await asyncio.wrap_future(future)


def prepare_env(spec: dict[str, str], options: dict[str, str]) -> dict[str, Any]:
    """Job: `BaseEnv.prepare`."""
    return answered(lambda: EnvSpec(**spec).load().prepare(options))


def query_list(spec: dict[str, str], environ: dict[str, str], split: str, params: dict[str, Any]) -> dict[str, Any]:
    """Job: `BaseEnv.get_query_list`."""

    def act() -> list[str]:
        os.environ.update(environ)
        return [str(task_id) for task_id in EnvSpec(**spec).load().get_query_list(split, params)]

    return answered(act)


def answered(act: Callable[[], Any]) -> dict[str, Any]:
    """What a job returns: the data that `act` returns, or the error that it raises."""
    # Not the exception itself: unpickling an env's own class would import env code in the server.
    try:
        return {"data": act()}
    except AioenvError as error:
        return {"error": (error.code, str(error))}
    except BaseException:
        return {"error": (EnvError.code, traceback.format_exc())}


def _begin(server: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    die_with_parent(signal.SIGKILL, server)
    os.dup2(2, 1)  # the server's stdout is for what it says itself
