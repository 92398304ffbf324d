"""Many episodes at once, for threads: the twin of `aioenv.client.rollout`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Sized
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from aioenv.client.rollout import CONCURRENCY, TaskLike
from aioenv.client.session import Action
from aioenv.schema import Message, Trajectory

if TYPE_CHECKING:
    from aioenv.client.sync import EnvClient

# Gets the conversation so far, gives the next action; None gives up. A plain function, or an async one.
Agent = Callable[[list[Message]], Action | Awaitable[Action | None] | None]


def rollout(
    client: EnvClient, agent: Agent, tasks: Iterable[TaskLike], **options: Any
) -> Generator[Trajectory, None, None]:
    """Play an episode of each task, many at a time; yields each trajectory as it ends.

    While the caller is at work on one, running episodes go on and no further one begins. The options are those of
    `aioenv.client.rollout.rollout`. A plain agent is called in worker threads, for as many episodes at once as are
    played, so it must bear that; an async one in the clients' event loop, where it must not block. With `make_agent`,
    agents are made in worker threads too. `tasks` is read by the thread that iterates.

    Leaving the loop early releases what runs, without waiting for agents: a thread can't be stopped.
    """
    thread, asynchronous = client._enter()
    feed = (_SizedFeed if isinstance(tasks, Sized) else _Feed)(tasks, options.get("concurrency", CONCURRENCY))
    make = functools.partial(_Player, agent, options.get("make_agent", False))
    episodes = asynchronous.rollout(make, feed, **{**options, "make_agent": True})  # type: ignore[arg-type]
    try:
        while True:
            feed.fill()
            episode = thread.run(_next(episodes))
            if episode is None:
                return
            feed.playing -= 1
            yield episode
    finally:
        # It has ended, after an interrupt it may still be ending, or this is the end of a forked process's copy.
        with contextlib.suppress(RuntimeError):
            thread.run(_close(episodes))


async def _next(episodes: AsyncGenerator[Trajectory, None]) -> Trajectory | None:
    return await anext(episodes, None)


async def _close(episodes: AsyncGenerator[Trajectory, None]) -> None:
    await episodes.aclose()


class _Feed(Iterator[TaskLike]):
    """Tasks for the rollout to take: fetched beforehand in the caller's thread, where an iterable may take its time."""

    def __init__(self, tasks: Iterable[TaskLike], concurrency: int) -> None:
        self.source = tasks
        self._tasks = iter(tasks)
        self._concurrency = concurrency
        self._fetched: deque[TaskLike] = deque()
        self.playing = 0  # taken, and not yielded yet

    def fill(self) -> None:
        """Have a task ready for each place that is free."""
        while len(self._fetched) < self._concurrency - self.playing:
            try:
                self._fetched.append(next(self._tasks))
            except StopIteration:
                return

    def __next__(self) -> TaskLike:
        if not self._fetched:
            raise StopIteration
        self.playing += 1
        return self._fetched.popleft()


class _SizedFeed(_Feed):
    """For the progress bar."""

    def __len__(self) -> int:
        assert isinstance(self.source, Sized)
        return len(self.source)


class _Player:
    """An agent of either kind, as one of the kind that the asynchronous rollout wants."""

    def __init__(self, agent: Any, make: bool, task: TaskLike) -> None:
        self._agent = agent
        self._to_make = make
        self._task = task

    async def __call__(self, messages: list[Message]) -> Action | None:
        if self._to_make:
            self._agent = await _in_thread(self._agent, self._task)
            self._to_make = False
        if inspect.iscoroutinefunction(self._agent) or inspect.iscoroutinefunction(type(self._agent).__call__):
            action = self._agent(messages)
        else:
            action = await _in_thread(self._agent, messages)
        # A plain function may give an awaitable, too: functools.partial of an async object, a lambda around one.
        return await action if inspect.isawaitable(action) else action  # type: ignore[no-any-return]


async def _in_thread(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call it in a daemon thread: an executor's threads would keep the interpreter from exiting."""
    outcome: Future[tuple[Any, BaseException | None]] = Future()

    def call() -> None:
        try:
            outcome.set_result((function(argument), None))
        except BaseException as error:
            outcome.set_result((None, error))

    outcome.set_running_or_notify_cancel()  # from here on a cancelled episode leaves it alone
    threading.Thread(target=call, name="aioenv-agent", daemon=True).start()
    result, error = await asyncio.wrap_future(outcome)
    if isinstance(error, Exception):
        raise error
    if error is not None:  # SystemExit: it ends this episode, not the event loop
        raise RuntimeError(f"the agent raised {error!r}") from error
    return result
