"""EnvClient: what a trainer calls.

arguments ─▶ request (bytes) ─▶ call ─▶ transport (one exchange) ─▶ reply (data or Failure) ─▶ result
                                           ▲                              │
                                           └──────── delay ◀── retry ◀────┤
                                                                          └─▶ fallback, or CallFailed
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from aioenv.client import errorlog, fallback, reply, request
from aioenv.client.call import Caller, uniform
from aioenv.client.fallback import Branches, Score
from aioenv.client.retry import Policy
from aioenv.client.rollout import Agent, TaskLike, rollout
from aioenv.client.session import Session
from aioenv.client.stats import OnFailure, Stats
from aioenv.client.transport import Transport
from aioenv.errors import CallFailed
from aioenv.schema import Message, Trajectory

# Seconds that releases have to end when the client is closed.
_RELEASE_GRACE = 5.0
# Seconds that the end of a session waits for its release.
_RELEASE_PATIENCE = 30.0


class EnvClient:
    """Asynchronous client of one aioenv service, for any number of concurrent calls in one event loop.

    Use it as `async with EnvClient(url) as client:`, or `await client.close()` at the end. All times are in seconds.

    What a call raises: with `on_error="fallback"` nothing but a cancellation, ever, not even for a wrong argument or
    a closed client; it returns the method's fallback (see `aioenv.client.fallback`) and logs the reason to the logger
    `aioenv.client`. With `on_error="raise"` it raises `aioenv.errors.CallFailed` in each of these cases, and nothing
    else. Only the constructor raises ValueError, at once. The codes are in the README and `aioenv.client.retry`.

    What is retried, up to `tries` times in all: only what may succeed later, never a 4xx. Every POST carries a
    `request_id`, the same over the tries of one call, by which an aioenv server runs it once and answers each try with
    the one reply. Other services of this protocol don't: there a step (and a fork, checkpoint or restore) is sent again
    only if it provably never ran (no connection came about, or the service said 503 in the protocol's form; a proxy's
    own 503 proves nothing), unless `retry_unsafe`; else its fallback says that the outcome is unknown.

    timeout, timeout_jitter   limit of each try: timeout + uniform(*timeout_jitter), drawn once per client (see the
                              property `timeout`), so that the clients of a stuck server don't come back all at once
    connect_timeout           limit of making a connection, within that
    deadline                  limit over all tries and waits of a call; None for none
    min_backoff, max_backoff  bounds of the waits between tries
    max_retry_after           the most that a server's Retry-After is honoured
    token                     sent as `Authorization: Bearer`
    terminate_when_gone       whether the fallback of a step on an instance that is gone for good says `is_terminated`,
                              so that a worker stops; AgentEvolver's own client never does
    on_failure                called with route, instance or task, and CallFailed for each call that fails for good
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
        parts = urlsplit(base_url)
        _ = parts.port  # raises ValueError where it is no port
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"base_url must look like http://127.0.0.1:8080, not {base_url!r}")
        if on_error not in ("fallback", "raise"):
            raise ValueError(f"on_error must be 'fallback' or 'raise', not {on_error!r}")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ValueError("token must be printable ASCII: it goes into a header")
        drawn = timeout + uniform(*timeout_jitter)
        if not (drawn > 0 and connect_timeout > 0):
            raise ValueError(f"time-outs must be over 0, not {drawn!r} and {connect_timeout!r}")
        policy = Policy(tries, min_backoff, max_backoff, max_retry_after, deadline, retry_unsafe)
        self._transport = Transport(base_url, token=token, connect_timeout=connect_timeout)
        self._caller = Caller(self._transport, policy, timeout=drawn, raises=on_error == "raise", on_failure=on_failure)
        self._terminate_when_gone = terminate_when_gone
        self._releases: set[asyncio.Task[None]] = set()
        errorlog.follow_environment()

    @property
    def base_url(self) -> str:
        return self._transport.base_url

    @property
    def stats(self) -> Stats:
        """Counters of calls, tries and failures."""
        return self._caller.stats

    @property
    def timeout(self) -> float:
        """The limit of each try in seconds, as drawn for this client."""
        return self._caller.timeout

    async def __aenter__(self) -> EnvClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Calls in flight and later ones fail with `client_closed`; harmless if repeated.

        Releases of sessions that were cancelled are waited for, for a few seconds.
        """
        if self._releases:
            await asyncio.wait(self._releases, timeout=_RELEASE_GRACE)
        await self._transport.close()

    async def get_env_profile(
        self, env_type: str, split: str = "train", params: Mapping[str, Any] | None = None, max_retry: int | None = None
    ) -> list[str]:
        """The task ids of a split; fallback `[]`. `max_retry`, here and below: tries of this call, at least 1."""

        def body() -> dict[str, Any]:
            return {
                "env_type": request.text(env_type, "env_type"),
                "params": {"split": split, **request.mapping(params, "params")},
            }

        return await self._caller.call("/get_env_profile", body, reply.task_ids, lambda error: [], max_retry)

    async def create_instance(
        self,
        env_type: str,
        task_id: str,
        instance_id: str | None = None,
        params: Mapping[str, Any] | None = None,
        max_retry: int | None = None,
    ) -> dict[str, Any]:
        """Make a world for a task: its state (messages), reward, is_terminated and info, which has its instance_id.

        Without an `instance_id` the client chooses one before the first try, so that a second try can't make a second
        world. After a fallback a world may nevertheless exist, if a reply was lost; the service reaps it when idle.
        """
        chosen = uuid.uuid4().hex if instance_id is None else instance_id

        def body() -> dict[str, Any]:
            return {
                "env_type": request.text(env_type, "env_type"),
                "task_id": request.text(task_id, "task_id"),
                "instance_id": request.text(chosen, "instance_id"),
                "params": request.mapping(params, "params"),
            }

        def failed(error: CallFailed) -> dict[str, Any]:
            return fallback.create(chosen, task_id or "", error)

        return await self._caller.call("/create", body, reply.created, failed, max_retry)

    async def step(
        self,
        instance_id: str,
        action: Mapping[str, Any] | Message | None = None,
        params: Mapping[str, Any] | None = None,
        max_retry: int | None = None,
    ) -> dict[str, Any]:
        """Take one action; state (one message), reward, is_terminated and info.

        `params["timeout"]`, in seconds, asks for a lower limit than the server's on what the action may take.
        """
        return await self._caller.call(
            "/step",
            lambda: _on_instance(instance_id, action, params),
            reply.stepped,
            lambda error: fallback.step(instance_id, error, self._terminate_when_gone),
            max_retry,
            idempotent=False,
        )

    async def evaluate(
        self,
        instance_id: str,
        messages: Mapping[str, Any] | Message | None = None,
        params: Mapping[str, Any] | None = None,
        max_retry: int | None = None,
    ) -> Score:
        """The env's score of the world as it stands: a float. Fallback 0.0, which has `.fallback` True and `.error`."""

        def body() -> dict[str, Any]:
            return _on_instance(instance_id, messages, params)

        def failed(error: CallFailed) -> Score:
            return Score(0.0, fallback.describe(error))

        return await self._caller.call("/evaluate", body, lambda data: Score(reply.score(data)), failed, max_retry)

    async def get_tools_info(
        self,
        instance_id: str,
        messages: Mapping[str, Any] | Message | None = None,
        params: Mapping[str, Any] | None = None,
        max_retry: int | None = None,
    ) -> Any:
        """What the env says of its tools (`/get_info`); fallback None."""

        def body() -> dict[str, Any]:
            return _on_instance(instance_id, messages, params)

        return await self._caller.call("/get_info", body, reply.any_data, lambda error: None, max_retry)

    async def fork(
        self,
        instance_id: str,
        n: int = 1,
        instance_ids: Iterable[str] | None = None,
        max_retry: int | None = None,
    ) -> Branches:
        """Make `n` independent copies of a live instance, all or none: a list of {"instance_id", "task_id", "step"}.

        With `instance_ids`, one for each of these. Each copy is an instance like any other, and is to be released.
        Fallback `[]`, with `.fallback` True and `.error`; if the reply was lost, copies may exist nevertheless: by
        ids that you chose they can be released.
        """

        def body() -> dict[str, Any]:
            # With ids, `n` need not be given; one that says something else is for the server to refuse.
            ids = None if instance_ids is None else request.texts(instance_ids, "instance_ids")
            params = {"n": n} if ids is None else {"instance_ids": ids, "n": len(ids) if n == 1 else n}
            return {"instance_id": request.text(instance_id, "instance_id"), "params": params}

        def failed(error: CallFailed) -> Branches:
            return Branches(error=fallback.describe(error))

        return await self._caller.call(
            "/fork", body, lambda data: Branches(reply.forked(data)), failed, max_retry, idempotent=False
        )

    async def checkpoint(
        self, instance_id: str, keep: bool = False, ttl: float | None = None, max_retry: int | None = None
    ) -> dict[str, Any]:
        """Save a live instance as it stands: {"checkpoint": its id, "instance_id", "step", …}.

        It lives as long as the instance, or longer if it is to `keep`, but at most `ttl` seconds after it was made or
        last restored (None: the server's default). The fallback's "checkpoint" is empty, and its info marked.
        """
        return await self._checkpointing("/checkpoint", instance_id, {"keep": keep, "ttl": ttl}, max_retry)

    async def restore(
        self, instance_id: str, checkpoint: str | None = None, max_retry: int | None = None
    ) -> dict[str, Any]:
        """Put an instance back to a checkpoint of its own (None: the latest), any number of times.

        One that has ended comes back, if the checkpoint was kept. Returns {"instance_id", "checkpoint", "step"};
        the fallback's "checkpoint" is empty, and its info marked.
        """
        return await self._checkpointing("/restore", instance_id, {"checkpoint": checkpoint}, max_retry)

    async def _checkpointing(
        self, route: str, instance_id: str, params: dict[str, Any], max_retry: int | None
    ) -> dict[str, Any]:
        return await self._caller.call(
            route,
            lambda: {"instance_id": request.text(instance_id, "instance_id"), "params": params},
            reply.checkpointed,
            lambda error: fallback.checkpoint(instance_id, error),
            max_retry,
            idempotent=False,
        )

    async def release_instance(self, instance_id: str, max_retry: int | None = None) -> bool:
        """End a world; fallback False. False is also what the service says of an unknown or already released id.

        With other services it may be False where a first try released the world and its reply was lost.
        """

        def body() -> dict[str, Any]:
            return {"instance_id": request.text(instance_id, "instance_id")}

        return await self._caller.call("/release", body, reply.released, lambda error: False, max_retry)

    async def release_soon(self, *instance_ids: str) -> None:
        """Release, for a `finally`: it goes on by itself where the caller is cancelled meanwhile, or it takes long.

        Raises nothing else: a failure is logged, and the service reaps what is idle.
        """

        async def release(instance_id: str) -> None:
            with contextlib.suppress(CallFailed):
                await self.release_instance(instance_id)

        tasks = [asyncio.create_task(release(instance_id)) for instance_id in instance_ids]
        self._releases.update(tasks)
        for task in tasks:
            task.add_done_callback(self._releases.discard)
        await asyncio.wait(tasks, timeout=_RELEASE_PATIENCE)

    def session(
        self,
        env_type: str,
        task_id: str,
        *,
        params: Mapping[str, Any] | None = None,
        instance_id: str | None = None,
        patience: float = 600.0,
    ) -> Session:
        """An episode to use with `async with`; see `Session`."""
        return Session(self, env_type, task_id, params=params, instance_id=instance_id, patience=patience)

    def rollout(self, agent: Agent, tasks: Iterable[TaskLike], **options: Any) -> AsyncGenerator[Trajectory, None]:
        """Play many episodes at once: yields their trajectories as they end; see `aioenv.client.rollout.rollout`."""
        return rollout(self, agent, tasks, **options)

    async def healthz(self, timeout: float = 10.0) -> bool:
        """Whether the service lives. One try; never raises."""
        return await self._transport.get("/healthz", timeout=timeout) == 200

    async def wait_ready(self, timeout: float = 600.0) -> bool:
        """Wait until the service has loaded its envs, which takes a while after its start. Never raises.

        True as soon as it has, also where it is full: creates wait in line then. False after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while True:
            if await self._transport.loaded(timeout=10.0):
                return True
            if time.monotonic() + 1.0 > end or self._transport.closed:
                return False
            await asyncio.sleep(1.0)

    async def ready(self, timeout: float = 10.0) -> bool:
        """Whether the service would take a create now. One try; never raises."""
        return await self._transport.get("/readyz", timeout=timeout) == 200


def _on_instance(instance_id: object, messages: object, params: object) -> dict[str, Any]:
    return {
        "instance_id": request.text(instance_id, "instance_id"),
        "messages": request.mapping(messages, "messages"),
        "params": request.mapping(params, "params"),
    }
