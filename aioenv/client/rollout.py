"""Many episodes at once: an agent, tasks, and what came of them as it comes."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any

from aioenv.client.session import Action, Session
from aioenv.schema import Message, Trajectory

if TYPE_CHECKING:
    from aioenv.client.client import EnvClient

logger = logging.getLogger("aioenv.client")

# Gets the conversation so far, gives the next action; None gives up. One that has to remember more than the
# conversation can be made for each episode: see `make_agent` below.
Agent = Callable[[list[Message]], Awaitable[Action | None]]
CONCURRENCY = 16  # episodes at once, unless told otherwise
# A task's id; or what has a `task_id`, and may have an `env_type` and `params`, such as a training schema's Task.
TaskLike = Any


async def rollout(
    client: EnvClient,
    agent: Agent,
    tasks: Iterable[TaskLike],
    *,
    env_type: str = "appworld",
    params: Mapping[str, Any] | None = None,
    evaluate_params: Mapping[str, Any] | None = None,
    concurrency: int = CONCURRENCY,
    max_steps: int = 30,
    episode_timeout: float | None = None,
    make_agent: bool = False,
    patience: float = 600.0,
    progress: bool = False,
) -> AsyncGenerator[Trajectory, None]:
    """Play an episode of each task, `concurrency` at a time; yields each trajectory as it ends, in any order.

    An episode ends when it terminates, after `max_steps`, when the agent returns None, or when it fails: its agent
    raised (an exception with a `code` of its own keeps it), it took longer than `episode_timeout` seconds, or the
    service failed for good. Then the trajectory's `info["error"]` says why (`code`, `message`, …) and the others go on.
    All others are scored, and that is their `reward.value`. A trajectory with an error has no score: leave it out of
    the training, or play it again.

    agent             an async callable from the conversation to the next action (a text or a message); with
                      `make_agent`, a callable that makes one of these for each task
    tasks             ids, or objects with a `task_id` and perhaps an `env_type`; taken from the iterable as they begin
    params            of each create; `evaluate_params` of each scoring, such as {"sparse": True}
    patience          see `Session`
    progress          show a bar, where tqdm is installed

    Leaving the loop early, or being cancelled, ends the episodes that run and releases their instances.
    """
    if concurrency < 1 or max_steps < 1:
        raise ValueError(f"concurrency and max_steps must be at least 1, not {concurrency!r} and {max_steps!r}")

    async def play(task: TaskLike) -> Trajectory:
        task_id, env = _names(task, env_type)
        session = Session(client, env, task_id, params=params, patience=patience)
        try:
            async with session:
                try:
                    async with asyncio.timeout(episode_timeout):
                        await _play(session, agent(task) if make_agent else agent, max_steps)
                        if session.error is None:
                            await session.evaluate(**(evaluate_params or {}))
                except TimeoutError:
                    session.fail("deadline", f"the episode took longer than {episode_timeout:g} s")
        except Exception as error:  # of a client that raises, or of what makes the agent
            _fail(session, error)
        return session.trajectory

    running: set[asyncio.Task[Trajectory]] = set()
    waiting = iter(tasks)
    bar = _bar(tasks) if progress else None
    try:
        while True:
            for task in _take(waiting, concurrency - len(running)):
                running.add(asyncio.create_task(play(task)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                if bar is not None:
                    bar.update(1)
                yield ended.result()
    finally:
        for left in running:
            left.cancel()
        if running:
            await asyncio.wait(running)
        if bar is not None:
            bar.close()


async def _play(session: Session, agent: Any, max_steps: int) -> None:
    for _ in range(max_steps):
        if session.done:
            return
        try:
            action = await agent(session.messages())
        except Exception as error:
            _fail(session, error)
            return
        if action is None:
            return
        await session.step(action)


def _fail(session: Session, error: Exception) -> None:
    """An exception with a `code` explains itself; any other is told with its traceback."""
    code = getattr(error, "code", None)
    if isinstance(code, str):
        session.fail(code, str(error))
        logger.error("the episode of task %s failed: %s: %s", session.task_id, code, error)
    else:
        session.fail("agent_error", traceback.format_exc())
        logger.exception("the episode of task %s failed", session.task_id)


def _names(task: TaskLike, env_type: str) -> tuple[str, str]:
    if isinstance(task, str):
        return task, env_type
    return task.task_id, getattr(task, "env_type", "") or env_type


def _take(tasks: Iterator[TaskLike], count: int) -> Iterator[TaskLike]:
    for _ in range(count):
        try:
            yield next(tasks)
        except StopIteration:
            return


def _bar(tasks: Iterable[TaskLike]) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        logger.warning("no progress bar: tqdm is not installed")
        return None
    return tqdm(total=len(tasks) if isinstance(tasks, Sized) else None, unit="episode")
