"""Plays episodes against any server of the protocol, and notes how long each call took. No key here is aioenv's own."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

from rawhttp import AsyncClient, BadReply


class CallFailed(Exception):
    """Noted already: whoever catches it only ends the episode."""


class Player:
    """The calls of one env, over one client."""

    def __init__(self, client: AsyncClient, env: str) -> None:
        self._client = client
        self._env = env
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)  # of calls that succeeded, by route
        self.errors: Counter[str] = Counter()  # by route and what was said

    async def task_ids(self, split: str) -> list[str]:
        found: list[str] = await self._call("get_env_profile", env_type=self._env, params={"split": split})
        return found

    async def create(self, task_id: str, params: dict[str, Any] | None = None) -> str:
        """The instance's id."""
        data = await self._call("create", env_type=self._env, task_id=task_id, params=params or {})
        return str(data["info"]["instance_id"])

    async def step(self, instance_id: str, message: dict[str, Any]) -> dict[str, Any]:
        data: dict[str, Any] = await self._call("step", instance_id=instance_id, messages=message)
        return data

    async def evaluate(self, instance_id: str) -> float:
        return float(await self._call("evaluate", instance_id=instance_id))

    async def release(self, instance_id: str) -> None:
        await self._call("release", instance_id=instance_id)

    async def finish(self, instance_id: str, message: dict[str, Any], steps: int) -> bool:
        """The rest of an episode, after its create: steps, evaluate, release. Whether all of it succeeded."""
        try:
            try:
                for _ in range(steps):
                    if (await self.step(instance_id, message))["is_terminated"]:
                        break
                await self.evaluate(instance_id)
            finally:
                await self.release(instance_id)
        except CallFailed:
            return False
        return True

    async def _call(self, route: str, **body: Any) -> Any:
        body = {"env_type": "default", "messages": {}, "params": {}, **body}
        began = time.perf_counter()
        try:
            status, reply = await self._client.exchange(route, body)
        except (BadReply, OSError, TimeoutError) as error:
            self._failed(route, repr(error))
        took = time.perf_counter() - began
        if status != 200 or not isinstance(reply, dict) or not reply.get("success"):
            detail = reply.get("detail") if isinstance(reply, dict) else reply
            self._failed(route, f"{status} {str(detail)[-200:]}")
        self.seconds[route].append(took)
        return reply.get("data")

    def _failed(self, route: str, what: str) -> Any:
        self.errors[f"/{route}: {what}"] += 1
        raise CallFailed(f"/{route}: {what}")
