"""What a call returns after its last try failed, where the client was not asked to raise.

A trainer's loop goes on with these, so each says what it is wherever it can: `info.fallback` is True and `info.error`
tells why; a score and a list of branches carry `.fallback` and `.error`. A fallback is never to be taken for an
observation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aioenv.errors import CallFailed

# The instance will never answer again: it ended, or the server that had it did.
_GONE = {"instance_gone", "unknown_instance", "step_timeout"}
_NOT_RUN = {"connection_failed", "bad_request", "at_capacity", "starting", "draining"}
_UNKNOWN = {"reply_lost", "timeout", "http_error", "bad_reply", "client_closed", "client_bug"}


def describe(error: CallFailed) -> dict[str, Any]:
    """`info.error`. `tries` is 0 where nothing was sent; `seconds` is the whole call's time, waits included."""
    return {
        "code": error.code,
        "message": error.message,
        "retryable": error.retryable,
        "instance_gone": error.instance_gone,
        "status": error.status,
        "tries": error.tries,
        "seconds": error.seconds,
    }


class Score(float):
    """What `EnvClient.evaluate` returns: a float that knows whether an env gave it.

    `fallback` is False and `error` None for a real score. Note that orjson, unlike json, doesn't encode subclasses of
    float: pass it `float(score)`.
    """

    fallback: bool
    error: dict[str, Any] | None

    def __new__(cls, value: float, error: dict[str, Any] | None = None) -> Score:
        score = super().__new__(cls, value)
        score.fallback = error is not None
        score.error = error
        return score

    def __reduce__(self) -> tuple[type[Score], tuple[float, dict[str, Any] | None]]:
        # Trainers send scores between processes; without this, pickle and copy would lose the mark.
        return Score, (float(self), self.error)


class Branches(list[dict[str, Any]]):
    """What `EnvClient.fork` returns: a list that knows whether the call failed.

    `fallback` is False and `error` None for real branches; after a failure the list is empty.
    """

    def __init__(self, branches: Iterable[dict[str, Any]] = (), error: dict[str, Any] | None = None) -> None:
        super().__init__(branches)
        self.fallback = error is not None
        self.error = error


def checkpoint(instance_id: str, error: CallFailed) -> dict[str, Any]:
    """Of a checkpoint or restore that failed: it names none."""
    return {"instance_id": instance_id, "checkpoint": "", "info": {"fallback": True, "error": describe(error)}}


def create(instance_id: str, task_id: str, error: CallFailed) -> dict[str, Any]:
    """A first state without a task in it."""
    return {
        "state": [
            {"role": "system", "content": f"The environment could not be created ({error.code}). There is no task."},
            {"role": "user", "content": "There is nothing to do here: end this episode without taking an action."},
        ],
        "reward": 0.0,
        "is_terminated": False,
        "info": {"instance_id": instance_id, "task_id": task_id, "fallback": True, "error": describe(error)},
    }


def step(instance_id: str, error: CallFailed, terminates: bool) -> dict[str, Any]:
    """One message that says whether the action ran, as far as that is known.

    If it `terminates`, it says `is_terminated` where the instance is gone for good: no step will succeed any more.
    """
    gone = error.instance_gone or error.code in _GONE
    if gone:
        outcome = "The environment has ended and takes no more actions."
    elif error.tries == 0 or error.code in _NOT_RUN:
        outcome = "The action was not run."
    elif error.code in _UNKNOWN:
        outcome = "It is unknown whether the action ran."
    else:
        outcome = "There is no observation."
    return {
        "state": [
            {"role": "assistant", "content": f"The step failed ({error.code}). {outcome}", "tool_calls": []},
        ],
        "reward": 0.0,
        "is_terminated": gone and terminates,
        "info": {"instance_id": instance_id, "task_id": "", "fallback": True, "error": describe(error)},
    }
