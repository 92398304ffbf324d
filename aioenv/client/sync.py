"""EnvClient for threads: what a trainer without an event loop calls. AgentEvolver's own client can be replaced by it.

a thread ─▶ EnvClient ─▶ LoopThread (one per process) ─▶ aioenv.client.EnvClient ─▶ …
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from typing import Any, Literal, TypeVar

from aioenv.client import loopthread
from aioenv.client.client import EnvClient as AsyncEnvClient
from aioenv.client.fallback import Branches, Score
from aioenv.client.rollout import TaskLike
from aioenv.client.stats import OnFailure, Stats
from aioenv.client.sync_rollout import Agent, rollout
from aioenv.client.sync_session import Session
from aioenv.schema import Message, Trajectory

T = TypeVar("T")

logger = logging.getLogger("aioenv.client")


class EnvClient:
    """Synchronous client of one aioenv service, for any number of threads at once.

    Options, methods and results are those of `aioenv.client.EnvClient`, and so is what is retried and what a call
    raises: with `on_error="fallback"` nothing, with "raise" CallFailed.

    All clients of a process share one event loop, in a daemon thread that the first call starts. A call blocks its
    thread, also where that runs an event loop of its own; only in the clients' loop itself, where `on_failure` and
    async agents run, a call raises RuntimeError. An exception in the waiting thread, such as KeyboardInterrupt, cancels
    the call. Closing is optional: what is garbage collected is closed, and no client holds up the interpreter's exit.

    In a forked process a client starts anew: own loop, connections, `timeout` and `stats`. It can be pickled, which
    keeps its options, the token among them.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8080",
        *,
        token: str | None = None,
        tries: int = 3,
        timeout: float = 150.0,
        timeout_jitter: tuple[float, float] = (50.0, 200.0),
        connect_timeout: float = 30.0,
        deadline: float | None = None,
        min_backoff: float = 3.0,
        max_backoff: float = 10.0,
        max_retry_after: float = 60.0,
        retry_unsafe: bool = False,
        on_error: Literal["fallback", "raise"] = "fallback",
        terminate_when_gone: bool = True,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "token": token,
            "tries": tries,
            "timeout": timeout,
            "timeout_jitter": timeout_jitter,
            "connect_timeout": connect_timeout,
            "deadline": deadline,
            "min_backoff": min_backoff,
            "max_backoff": max_backoff,
            "max_retry_after": max_retry_after,
            "retry_unsafe": retry_unsafe,
            "on_error": on_error,
            "terminate_when_gone": terminate_when_gone,
            "on_failure": on_failure,
        }
        self._closed = False
        self._clients: dict[int, AsyncEnvClient] = {}  # by generation of the process
        self._here()

    def __reduce__(self) -> tuple[Callable[[], EnvClient], tuple[()]]:
        return functools.partial(type(self), **self._options), ()

    def _here(self) -> AsyncEnvClient:
        """The client that does the work in this process, each in the clients' event loop."""
        generation = loopthread.generation
        if generation not in self._clients:
            made = self._closed_one() if self._closed else AsyncEnvClient(**self._options)
            # Without a lock, which a fork could leave locked: of two threads that come at once, one makes it in vain.
            if self._clients.setdefault(generation, made) is made:
                # Of the transport, as the client holds `on_failure`, and that may well hold this object.
                weakref.finalize(self, loopthread.drop, made._transport).atexit = False
        return self._clients[generation]

    def _closed_one(self) -> AsyncEnvClient:
        client = AsyncEnvClient(**self._options)
        loopthread.without_loop(client.close())
        return client

    def _enter(self) -> tuple[loopthread.LoopThread, AsyncEnvClient]:
        """Where a call goes. Raises NoLoop."""
        client, thread = self._here(), loopthread.current()
        thread.transports.add(client._transport)
        return thread, client

    def _run(self, call: Callable[[AsyncEnvClient], Coroutine[Any, Any, T]]) -> T:
        try:
            thread, client = self._enter()
        except loopthread.NoLoop as error:
            # A fallback, or CallFailed, as for any other reason why a call can't be made.
            logger.error("the next call is answered as by a closed client: %s", error)
            return loopthread.without_loop(call(self._closed_one()))
        return thread.run(call(client))

    @property
    def base_url(self) -> str:
        return self._here().base_url

    @property
    def stats(self) -> Stats:
        """Counters of calls, tries and failures."""
        return self._here().stats

    @property
    def timeout(self) -> float:
        """The limit of each try in seconds, as drawn for this client."""
        return self._here().timeout

    def __enter__(self) -> EnvClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Calls in flight and later ones fail with `client_closed`; harmless if repeated."""
        self._closed = True
        with contextlib.suppress(loopthread.NoLoop):  # then the process's end closes them
            thread, client = self._enter()
            thread.run(client.close())
            thread.transports.discard(client._transport)

    def get_env_profile(
        self, env_type: str, split: str = "train", params: Mapping[str, Any] | None = None, max_retry: int | None = None
    ) -> list[str]:
        """The task ids of a split; fallback `[]`. `max_retry`, here and below: tries of this call, at least 1."""
        return self._run(lambda client: client.get_env_profile(env_type, split, params, max_retry))

    def create_instance(
        self,
        env_type: str,
        task_id: str,
        instance_id: str | None = None,
        params: Mapping[str, Any] | None = None,
        max_retry: int | None = None,
    ) -> dict[str, Any]:
        """Make a world for a task: its state (messages), reward, is_terminated and info, which has its instance_id.

        Without an `instance_id` the client chooses one. After a fallback a world may nevertheless exist, if a reply was
        lost; the service reaps it when idle.
        """
        return self._run(lambda client: client.create_instance(env_type, task_id, instance_id, params, max_retry))

    def step(
        self,
        instance_id: str,
        action: Mapping[str, Any] | Message | None = None,
        params: Mapping[str, Any] | None = None,
        max_retry: int | None = None,
    ) -> dict[str, Any]:
        """Take one action; state (one message), reward, is_terminated and info.

        `params["timeout"]`, in seconds, asks for a lower limit than the server's on what the action may take.
        """
        return self._run(lambda client: client.step(instance_id, action, params, max_retry))

    def evaluate(
        self,
        instance_id: str,
        messages: Mapping[str, Any] | Message | None = None,
        params: Mapping[str, Any] | None = None,
        max_retry: int | None = None,
    ) -> Score:
        """The env's score of the world as it stands: a float. Fallback 0.0, which has `.fallback` True and `.error`."""
        return self._run(lambda client: client.evaluate(instance_id, messages, params, max_retry))

    def get_tools_info(
        self,
        instance_id: str,
        messages: Mapping[str, Any] | Message | None = None,
        params: Mapping[str, Any] | None = None,
        max_retry: int | None = None,
    ) -> Any:
        """What the env says of its tools (`/get_info`); fallback None."""
        return self._run(lambda client: client.get_tools_info(instance_id, messages, params, max_retry))

    def fork(
        self,
        instance_id: str,
        n: int = 1,
        instance_ids: Iterable[str] | None = None,
        max_retry: int | None = None,
    ) -> Branches:
        """Make `n` independent copies of a live instance, all or none: a list of {"instance_id", "task_id", "step"}.

        With `instance_ids`, one for each of these. Fallback `[]`, with `.fallback` True and `.error`.
        """
        return self._run(lambda client: client.fork(instance_id, n, instance_ids, max_retry))

    def checkpoint(
        self, instance_id: str, keep: bool = False, ttl: float | None = None, max_retry: int | None = None
    ) -> dict[str, Any]:
        """Save a live instance as it stands: {"checkpoint": its id, "instance_id", "step", …}.

        The fallback's "checkpoint" is empty, and its info marked.
        """
        return self._run(lambda client: client.checkpoint(instance_id, keep, ttl, max_retry))

    def restore(self, instance_id: str, checkpoint: str | None = None, max_retry: int | None = None) -> dict[str, Any]:
        """Put an instance back to a checkpoint of its own (None: the latest), any number of times."""
        return self._run(lambda client: client.restore(instance_id, checkpoint, max_retry))

    def release_instance(self, instance_id: str, max_retry: int | None = None) -> bool:
        """End a world; fallback False. False is also what the service says of an unknown or already released id."""
        return self._run(lambda client: client.release_instance(instance_id, max_retry))

    def release_soon(self, *instance_ids: str) -> None:
        """Release, for a `finally`: it goes on by itself where the waiting is interrupted, or it takes long.

        Raises nothing else: a failure is logged, and the service reaps what is idle.
        """
        with contextlib.suppress(loopthread.NoLoop):
            thread, client = self._enter()
            thread.run(client.release_soon(*instance_ids))

    def session(
        self,
        env_type: str,
        task_id: str,
        *,
        params: Mapping[str, Any] | None = None,
        instance_id: str | None = None,
        patience: float = 600.0,
    ) -> Session:
        """An episode to use with `with`; see `Session`."""
        return Session(self, env_type, task_id, params=params, instance_id=instance_id, patience=patience)

    def rollout(self, agent: Agent, tasks: Iterable[TaskLike], **options: Any) -> Generator[Trajectory, None, None]:
        """Play many episodes at once: yields their trajectories as they end. The agent may be a plain function.

        See `aioenv.client.sync_rollout.rollout`; it raises RuntimeError where no thread can be started.
        """
        return rollout(self, agent, tasks, **options)

    def healthz(self, timeout: float = 10.0) -> bool:
        """Whether the service lives. One try; never raises."""
        return self._run(lambda client: client.healthz(timeout))

    def wait_ready(self, timeout: float = 600.0) -> bool:
        """Wait until the service has loaded its envs, which takes a while after its start. Never raises.

        True as soon as it has, also where it is full: creates wait in line then. False after `timeout` seconds.
        """
        return self._run(lambda client: client.wait_ready(timeout))

    def ready(self, timeout: float = 10.0) -> bool:
        """Whether the service would take a create now. One try; never raises."""
        return self._run(lambda client: client.ready(timeout))
