"""An env that writes down every action before it answers, so that one that ran twice, or never, is found out."""

from __future__ import annotations

import os
import time
from typing import Any

from aioenv.envs import BaseEnv
from aioenv.errors import BadRequest

TASKS = 24  # more than group templates are kept, so that some are always made and ended


class CountEnv(BaseEnv):
    """An action's content is its id, or `done` and its id to end the episode. `params.ledger` of the create is the file
    to write to; `params.sleep` of a step is in seconds."""

    forkable = True

    def __init__(self, task_id: str, instance_id: str, params: dict[str, Any]) -> None:
        super().__init__(task_id, instance_id, params)
        if not isinstance(params.get("ledger"), str):
            raise BadRequest('"params.ledger" must be the path of a file')
        self.actions = 0

    def get_init_state(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"state": [{"role": "user", "content": f"Task {self.task_id}: act."}]}

    def step(self, action: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        word, _, rest = str(action.get("content")).partition(" ")
        done = word == "done"
        action_id = rest if done else word
        self._write_down(action_id)
        self.actions += 1
        # Only now: a world that is killed here has acted, and nobody was told.
        time.sleep(params.get("sleep", 0))
        content = f"{self.instance_id} {action_id} {self.actions}"
        return {"state": [{"role": "user", "content": content}], "is_terminated": done}

    def _write_down(self, action_id: str) -> None:
        """In one write, so that lines of different worlds don't mix; opened anew, as copies would share a position."""
        ledger = os.open(self.params["ledger"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(ledger, f"{self.instance_id} {action_id}\n".encode())
        finally:
            os.close(ledger)

    def evaluate(self, messages: dict[str, Any], params: dict[str, Any]) -> float:
        return float(self.actions)

    @staticmethod
    def get_query_list(split: str, params: dict[str, Any]) -> list[str]:
        return [f"t{number}" for number in range(1, TASKS + 1)]
