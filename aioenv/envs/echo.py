"""The smallest env: it says back what it hears. For trying the service out, and for measuring what it adds."""

from __future__ import annotations

from typing import Any

from aioenv.envs.base import BaseEnv
from aioenv.envs.registry import Registry
from aioenv.errors import BadRequest

SPLITS = ("train", "dev")
TASKS_PER_SPLIT = 8


@Registry.register("echo")
class EchoEnv(BaseEnv):
    """Any task id will do. Saying `done` ends the episode; the score is 1.0 from then on, and 0.0 before."""

    forkable = True
    done = False

    def get_init_state(self, params: dict[str, Any]) -> dict[str, Any]:
        return {
            "state": [
                {"role": "system", "content": "You are talking to an echo. Say `done` to end the episode."},
                {"role": "user", "content": f"This is task {self.task_id}. Say something."},
            ],
            "reward": 0.0,
            "is_terminated": False,
            "info": {},
        }

    def step(self, action: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        content = action.get("content") or ""
        self.done = self.done or (isinstance(content, str) and content.strip() == "done")
        return {
            "state": [{"role": "user", "content": content}],
            "reward": float(self.done),
            "is_terminated": self.done,
            "info": {},
        }

    def evaluate(self, messages: dict[str, Any], params: dict[str, Any]) -> float:
        return float(self.done)

    def get_info(self, messages: dict[str, Any], params: dict[str, Any]) -> str:
        return "There are no tools: whatever you say comes back. Say `done` to end the episode."

    @staticmethod
    def get_query_list(split: str, params: dict[str, Any]) -> list[str]:
        if split not in SPLITS:
            raise BadRequest(f"unknown split {split!r}; there is: {', '.join(SPLITS)}")
        return [f"{split}-{number}" for number in range(1, TASKS_PER_SPLIT + 1)]
