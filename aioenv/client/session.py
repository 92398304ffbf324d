"""An episode as an object: made, stepped, scored, and released on every way out."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioenv.client import fallback
from aioenv.client.call import uniform
from aioenv.client.fallback import Score
from aioenv.errors import CallFailed
from aioenv.schema import ActionMessage, Message, Reward, Trajectory

if TYPE_CHECKING:
    from aioenv.client.client import EnvClient

# A create that a full or starting server turned away is asked again after so many seconds.
_BUSY_PAUSE = 5.0
_BUSY = {"at_capacity", "starting"}

Action = str | Message | Mapping[str, Any]


@dataclass(frozen=True)
class _Memory:
    """What a session knew of its episode at some time. Nobody else holds what is in it."""

    state: list[dict[str, Any]]
    done: bool
    reward: float
    error: dict[str, Any] | None
    trajectory: Trajectory


class Session:
    """One episode on an instance of its own: `async with client.session("appworld", task_id) as session`.

    state        the messages that the env showed last, as dicts
    done         no further step makes sense: the episode terminated, failed, or could not begin
    reward       of the last step
    error        why a call failed for good, as in `info.error` of a fallback; None while all is well
    trajectory   what happened so far, without the calls that failed

    Between two steps it can be branched: `branch`, `branches`; and saved, to go back there: `checkpoint`, `restore`.
    """

    def __init__(
        self,
        client: EnvClient,
        env_type: str,
        task_id: str,
        *,
        params: Mapping[str, Any] | None = None,
        instance_id: str | None = None,
        patience: float = 600.0,
    ) -> None:
        """`patience`: seconds for which a server that is full or starting is asked again for an instance."""
        self.env_type = env_type
        self.task_id = task_id
        # Chosen here, so that the instance can be released whatever becomes of its create.
        self.instance_id = instance_id or uuid.uuid4().hex
        self.state: list[dict[str, Any]] = []
        self.done = False
        self.reward = 0.0
        self.error: dict[str, Any] | None = None
        self.trajectory = Trajectory(task_id=task_id, env_type=env_type, instance_id=self.instance_id)
        self._client = client
        self._params = params
        self._patience = patience
        self._is_branch = False
        self._checkpoints: dict[str, _Memory] = {}

    async def __aenter__(self) -> Session:
        """Make the instance, unless it is a branch, which has one. With a client that was told to raise, raises
        CallFailed."""
        if self._is_branch:
            return self
        try:
            created = await self._create()
        except BaseException:
            # Cancelled, most likely: the instance may be there all the same.
            await self._client.release_soon(self.instance_id)
            raise
        self._take(created)
        if self.error is None:
            self._record(lambda: setattr(self, "trajectory", Trajectory.start(created, env_type=self.env_type)))
        return self

    async def _create(self) -> dict[str, Any]:
        began = time.monotonic()
        while True:
            try:
                created = await self._client.create_instance(
                    self.env_type, self.task_id, self.instance_id, self._params
                )
                failed = created["info"]["error"]["code"] if created["info"].get("fallback") else ""
            except CallFailed as failure:
                if not self._asks_again(failure.code, began):
                    raise
            else:
                if not self._asks_again(failed, began):
                    return created
            await asyncio.sleep(uniform(0.5, 1.5) * _BUSY_PAUSE)

    def _asks_again(self, code: str, began: float) -> bool:
        return code in _BUSY and time.monotonic() - began < self._patience

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.release_soon(self.instance_id)

    async def step(self, action: Action, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Take one action, a text or an assistant's message; the step's data, as of `EnvClient.step`.

        Nothing is sent once the session is `done`: the answer is a fallback then.
        """
        message = _message(action)
        if self.done:
            over = CallFailed("the episode is over", code="bad_request", tries=0)
            return {**fallback.step(self.instance_id, over, terminates=True), "is_terminated": True}
        reply = await self._client.step(self.instance_id, message, params)
        self._take(reply)
        if self.error is None:
            self._record(lambda: self.trajectory.add(message, reply))
        return reply

    async def evaluate(self, **params: Any) -> Score:
        """The env's score as it stands, which becomes the trajectory's reward; keywords are the call's params."""
        score = await self._client.evaluate(self.instance_id, params=params)
        if score.fallback:
            self._fail(score.error)
        else:
            self.trajectory.reward = Reward(value=float(score), info=self.trajectory.reward.info)
        return score

    # -- branching ---------------------------------------------------------------------------------------------------

    async def branch(self, n: int = 1) -> list[Session]:
        """`n` sessions that go on from here, each on a copy of the instance and with a copy of the trajectory.

        They have begun, and are released when they are left: use each with `async with`, or see `branches`. They
        outlive this one. Where the copies could not be made, all of them are `done` and have the `error`; this one is
        as it was. With a client that was told to raise, raises CallFailed.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n!r}")
        memory = self._remember()
        # Chosen here, so that they can be released whatever becomes of the call.
        ids = [uuid.uuid4().hex for _ in range(n)]
        try:
            made = await self._client.fork(self.instance_id, n, ids)
        except BaseException:
            await self._client.release_soon(*ids)
            raise
        branches = [self._branch(instance_id, memory) for instance_id in ids]
        if made.error is not None:
            for branch in branches:
                branch._fail(made.error)
        return branches

    @contextlib.asynccontextmanager
    async def branches(self, n: int = 1) -> AsyncIterator[list[Session]]:
        """`async with session.branches(8) as branches`: as `branch`; all of them are released at its end."""
        made = await self.branch(n)
        try:
            yield made
        finally:
            await self._client.release_soon(*(branch.instance_id for branch in made))

    def _branch(self, instance_id: str, memory: _Memory) -> Session:
        branch = Session(
            self._client,
            self.env_type,
            self.task_id,
            params=self._params,
            instance_id=instance_id,
            patience=self._patience,
        )
        branch._is_branch = True
        branch._recall(memory)
        branch.trajectory.instance_id = instance_id
        if "instance_id" in branch.trajectory.info:
            branch.trajectory.info["instance_id"] = instance_id
        return branch

    async def checkpoint(self, *, keep: bool = False, ttl: float | None = None) -> str:
        """Save the episode as it stands: an id for `restore`; see `EnvClient.checkpoint`.

        A failure ends the episode, as of a step; the id is empty then.
        """
        memory = self._remember()
        made = await self._client.checkpoint(self.instance_id, keep, ttl)
        if made.get("info", {}).get("fallback"):
            self._fail(made["info"]["error"])
        else:
            self._checkpoints[made["checkpoint"]] = memory
        return str(made["checkpoint"])

    async def restore(self, checkpoint: str) -> None:
        """Go back to a checkpoint of this session: the instance, and state, done, reward, error and trajectory.

        As often as one likes, and from an episode that has ended or failed, too. A failure ends the episode.
        """
        memory = self._checkpoints.get(checkpoint)
        if memory is None:
            self.fail("bad_request", f"this session has no checkpoint {checkpoint!r}")
            return
        restored = await self._client.restore(self.instance_id, checkpoint)
        if restored.get("info", {}).get("fallback"):
            self._fail(restored["info"]["error"])
        else:
            self._recall(memory)

    def _remember(self) -> _Memory:
        now = _Memory(self.state, self.done, self.reward, self.error, self.trajectory)
        return copy.deepcopy(now)

    def _recall(self, memory: _Memory) -> None:
        then = copy.deepcopy(memory)
        self.state, self.done, self.reward = then.state, then.done, then.reward
        self.error, self.trajectory = then.error, then.trajectory

    # -- looking, failing --------------------------------------------------------------------------------------------

    def messages(self) -> list[Message]:
        """The whole conversation so far, as an agent wants it."""
        return self.trajectory.messages()

    def fail(self, code: str, message: str) -> None:
        """End the episode for a reason outside of the service: what an agent raised, a deadline."""
        self._fail({"code": code, "message": message, "retryable": False, "instance_gone": False})

    def _take(self, reply: dict[str, Any]) -> None:
        self.state = reply["state"]
        self.reward = reply["reward"]
        self.done = reply["is_terminated"]
        if reply["info"].get("fallback"):
            self._fail(reply["info"]["error"])

    def _record(self, add: Callable[[], Any]) -> None:
        try:
            add()
        except ValueError as wrong:
            self.fail("bad_reply", f"what the env shows is no message: {wrong}")

    def _fail(self, error: dict[str, Any] | None) -> None:
        self.done = True
        if self.error is None:
            self.error = error
            self.trajectory.info = {**self.trajectory.info, "error": error}


def _message(action: Action) -> ActionMessage:
    """Raises ValueError, as the caller's mistake, where it is no message."""
    if isinstance(action, str):
        return ActionMessage(content=action)
    if isinstance(action, ActionMessage):
        return action
    return ActionMessage(**(action.simple_dict() if isinstance(action, Message) else action))
