"""What an env returned, checked and brought into the protocol's shape, as JSON. Nothing from a world is trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson

from aioenv.errors import EnvError
from aioenv.pool import jobs
from aioenv.pool.answer import read_answer
from aioenv.pool.replay import Reply
from aioenv.pool.wire import Body


def initial_reply(data: Any, instance_id: str, task_id: str) -> Reply:
    """The `data` of a `/create` reply. Raises EnvError where the env returned something else."""
    reply = _observed("get_init_state", data)
    return _encode(
        {
            "state": reply["state"],
            "reward": _number("get_init_state", reply["reward"]),
            "is_terminated": reply["is_terminated"],
            "info": {**reply["info"], "instance_id": instance_id, "task_id": task_id},
        },
        has_info=True,
    )


def step_reply(data: Any, instance_id: str, task_id: str, step: int) -> Reply:
    """The `data` of a `/step` reply: exactly one message in `state`. Raises EnvError."""
    reply = _observed("step", data)
    state = reply["state"]
    if len(state) != 1:
        raise EnvError(f"step must return a state of exactly one message, not {len(state)}")
    return _encode(
        {
            "state": [{"tool_calls": [], **state[0]}],
            "reward": _number("step", reply["reward"]),
            "is_terminated": reply["is_terminated"],
            "info": {**reply["info"], "instance_id": instance_id, "task_id": task_id, "step": step},
        },
        has_info=True,
    )


def score(data: Any) -> Reply:
    """The `data` of an `/evaluate` reply. Raises EnvError."""
    return _encode(_number("evaluate", data))


def any_data(data: Any) -> Reply:
    """The `data` of a `/get_info` reply."""
    return _encode(data)


Shape = Callable[..., Reply]


def shape_job(shape: Shape, body: Body, *args: Any) -> dict[str, Any]:
    """Job: one of the above, of a large answer that nobody has read. Raises NoAnswer, too."""
    return jobs.answered(lambda: shape(read_answer(body), *args))


def _encode(data: Any, has_info: bool = False) -> Reply:
    try:
        return Reply(orjson.dumps(data), has_info=has_info)
    except TypeError as error:  # deeper than JSON is written
        raise EnvError(f"the env's answer can't be sent as JSON: {error}") from None


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
