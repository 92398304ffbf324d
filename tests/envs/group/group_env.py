"""An env that can be forked, and tells what it knows of it."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from aioenv.envs import BaseEnv


class GroupEnv(BaseEnv):
    forkable = True

    def __init__(self, task_id: str, instance_id: str, params: dict[str, Any]) -> None:
        super().__init__(task_id, instance_id, params)
        if task_id == "raise":
            raise RuntimeError("raised in the constructor")
        if task_id == "hang":
            time.sleep(1000)
        time.sleep(params.get("sleep", 0))
        self.made_in = os.getpid()
        self.events = ["made"]
        self.drawn = random.random()
        self.notes: list[str] = []

    def get_init_state(self, params: dict[str, Any]) -> dict[str, Any]:
        self.events.append("observed")
        content = "x" * 2**21 if self.task_id == "big" else f"{self.made_in} {self.drawn}"
        return {"state": [{"role": "user", "content": content}]}

    def before_fork(self) -> None:
        self.events.append("before_fork")
        if self.notes[-1:] == ["refuses"]:
            raise RuntimeError("raised in before_fork")

    def after_fork(self) -> None:
        if self.task_id == "wake fails":
            raise RuntimeError("raised in after_fork")
        self.events.append("after_fork")
        if self.notes[-1:] == ["breaks"] and os.getpid() != self.lives_in:
            raise RuntimeError("raised in a copy")
        if self.notes[-1:] == ["dies"] and os.getpid() != self.lives_in:
            os._exit(4)

    def step(self, action: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        if action.get("content") == "exit":
            os._exit(3)
        if action.get("content") == "write":
            Path("file.txt").write_text(self.instance_id)
        if action.get("content") == "read":
            self.notes.append(Path("file.txt").read_text())
        if action.get("content") == "sleep":
            time.sleep(1)
        self.notes.append(str(action.get("content")))
        self.lives_in = os.getpid()
        told = {
            "id": self.instance_id,
            "cwd": os.getcwd(),
            "events": self.events,
            "made_in": self.made_in,
            "pid": os.getpid(),
            "drawn": self.drawn,
            "notes": self.notes,
        }
        return {"state": [{"role": "user", "content": told}]}

    def save(self) -> None:
        Path("notes.txt").write_text(" ".join(self.notes))

    def evaluate(self, messages: dict[str, Any], params: dict[str, Any]) -> float:
        return float(len(self.notes))

    @staticmethod
    def get_query_list(split: str, params: dict[str, Any]) -> list[str]:
        return ["t"]
