"""What an env returned, checked and brought into the protocol's shape. Pure; nothing from a world is trusted."""

from __future__ import annotations

import math
from typing import Any

from aioenv.errors import EnvError


def initial_reply(data: Any, instance_id: str, task_id: str) -> dict[str, Any]:
    """The `data` of a `/create` reply. Raises EnvError where the env returned something else."""
    reply = _observed("get_init_state", data)
    return {
        "state": reply["state"],
        "reward": _number("get_init_state", reply["reward"]),
        "is_terminated": reply["is_terminated"],
        "info": {**reply["info"], "instance_id": instance_id, "task_id": task_id},
    }


def step_reply(data: Any, instance_id: str, task_id: str, step: int) -> dict[str, Any]:
    """The `data` of a `/step` reply: exactly one message in `state`. Raises EnvError."""
    reply = _observed("step", data)
    state = reply["state"]
    if len(state) != 1:
        raise EnvError(f"step must return a state of exactly one message, not {len(state)}")
    return {
        "state": [{"tool_calls": [], **state[0]}],
        "reward": _number("step", reply["reward"]),
        "is_terminated": reply["is_terminated"],
        "info": {**reply["info"], "instance_id": instance_id, "task_id": task_id, "step": step},
    }


def score(data: Any) -> float:
    """The `data` of an `/evaluate` reply. Raises EnvError."""
    return _number("evaluate", data)


def _observed(method: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise EnvError(f"{method} must return a dict, not {_type(data)}")
    state = data.get("state")
    if not isinstance(state, list) or not all(isinstance(message, dict) for message in state):
        raise EnvError(f'{method} must return {{"state": [message, …]}} with dicts for messages, not {_type(state)}')
    terminated = data.get("is_terminated", False)
    if not isinstance(terminated, bool):
        raise EnvError(f'{method} must return a bool as "is_terminated", not {_type(terminated)}')
    info = data.get("info") or {}
    if not isinstance(info, dict):
        raise EnvError(f'{method} must return a dict as "info", not {_type(info)}')
    return {"state": state, "reward": data.get("reward", 0.0), "is_terminated": terminated, "info": info}


def _number(method: str, value: Any) -> float:
    # JSON has no NaN: it arrives as null.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EnvError(f"{method} must return a finite number as its reward, not {_type(value)}")
    return float(value)


def _type(value: Any) -> str:
    return "null (None, NaN or infinity)" if value is None else type(value).__name__
