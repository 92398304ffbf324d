"""An episode as an object: made, stepped, scored, and released on every way out."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
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


class Session:
    """One episode on an instance of its own: `async with client.session("appworld", task_id) as session`.

    state        the messages that the env showed last, as dicts
    done         no further step makes sense: the episode terminated, failed, or could not begin
    reward       of the last step
    error        why a call failed for good, as in `info.error` of a fallback; None while all is well
    trajectory   what happened so far, without the calls that failed
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

    async def __aenter__(self) -> Session:
        """Make the instance. With a client that was told to raise, raises CallFailed."""
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
