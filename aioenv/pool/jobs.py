"""Env code that needs no live world (preparing, task lists), in a ProcessPoolExecutor."""

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
from aioenv.errors import AioenvError, BadRequest, EnvError, InternalError
from aioenv.pool.linux import die_with_parent

log = logging.getLogger("aioenv.pool")

WORKERS = 2


class Jobs:
    """`run` a module-level function in another process. A broken executor is replaced, and the job told so."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None

    async def run(self, job: Callable[..., dict[str, Any]], *args: Any, limit: float | None = None) -> Any:
        """The job's data. Raises BadRequest or EnvError as the job did; InternalError where its process died or
        `limit` seconds passed (its process is killed then)."""
        executor = self._executor
        if executor is None:
            executor = self._executor = ProcessPoolExecutor(
                WORKERS,
                # Not fork: the server has threads and sockets.
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(os.getpid(),),
            )
        try:
            async with asyncio.timeout(limit):
                answer = await asyncio.get_running_loop().run_in_executor(executor, job, *args)
        except (BrokenProcessPool, TimeoutError) as error:
            self._drop(executor)
            what = f"passed its {limit:g} s limit" if isinstance(error, TimeoutError) else "lost its process"
            log.error("job %s %s; its executor is replaced", job.__name__, what)
            raise InternalError(f"job {job.__name__} {what}; try again") from None
        if "error" in answer:
            code, message = answer["error"]
            raise (BadRequest if code == BadRequest.code else EnvError)(message)
        return answer["data"]

    def _drop(self, executor: ProcessPoolExecutor) -> None:
        if self._executor is executor:
            self._executor = None
        processes = list((executor._processes or {}).values())
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()

    async def close(self) -> None:
        if self._executor is not None:
            executor, self._executor = self._executor, None
            for process in list((executor._processes or {}).values()):
                process.kill()
            await asyncio.to_thread(executor.shutdown, wait=True, cancel_futures=True)


def prepare_env(spec: dict[str, str], options: dict[str, str]) -> dict[str, Any]:
    """Job: `BaseEnv.prepare`."""
    return _answer(lambda: EnvSpec(**spec).load().prepare(options))


def query_list(spec: dict[str, str], environ: dict[str, str], split: str, params: dict[str, Any]) -> dict[str, Any]:
    """Job: `BaseEnv.get_query_list`."""

    def act() -> list[str]:
        os.environ.update(environ)
        return [str(task_id) for task_id in EnvSpec(**spec).load().get_query_list(split, params)]

    return _answer(act)


def _answer(act: Callable[[], Any]) -> dict[str, Any]:
    # Not the exception itself: unpickling an env's own class would import env code in the server.
    try:
        return {"data": act()}
    except AioenvError as error:
        return {"error": (error.code, str(error))}
    except BaseException:
        return {"error": (EnvError.code, traceback.format_exc())}


def _begin(server: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for the server alone
    die_with_parent(signal.SIGKILL, server)
