"""What a reply says: pure functions from status and bytes to data or a Failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from aioenv.client.retry import Failure

T = TypeVar("T")

_EXCERPT = 200  # characters of a foreign reply that go into the error message


class WrongShape(ValueError):
    """A success whose data isn't what the protocol says. Never leaves the client."""


def read_reply(
    status: int, body: bytes, retry_after: str | None, shape: Callable[[dict[str, Any]], T]
) -> tuple[T] | Failure:
    """The call's result in a 1-tuple (it may be None), or why there is none. Never raises.

    `shape` takes the result out of the reply's JSON object, or raises WrongShape.
    """
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as broken:
        return _foreign(status, body, retry_after, f"not JSON ({broken})")
    if not isinstance(reply, dict):
        return _foreign(status, body, retry_after, "not a JSON object")
    error = reply.get("error")
    if isinstance(error, dict) and isinstance(error.get("code"), str):
        return _said(status, reply, error, retry_after)
    if not 200 <= status < 300:
        return _foreign(status, body, retry_after, "without an error object", detail=reply.get("detail"))
    try:
        return (shape(reply),)
    except WrongShape as wrong:
        return Failure("bad_reply", f"reply with status {status}: {wrong}; it is {_excerpt(body)}", status=status)


def _said(status: int, reply: dict[str, Any], error: dict[str, Any], retry_after: str | None) -> Failure:
    """A failure in the protocol's own form."""
    message = error.get("message") or reply.get("detail") or error["code"]
    retryable = error.get("retryable") is True
    return Failure(
        error["code"],
        str(message),
        status=status,
        retryable=retryable,
        instance_gone=error.get("instance_gone") is True,
        # Only aioenv's own 503 proves that nothing ran: a proxy's may also mean that the server died meanwhile.
        never_ran=status == 503 and retryable,
        retry_after=_seconds(status, retry_after),
    )


def _foreign(status: int, body: bytes, retry_after: str | None, why: str, *, detail: object = None) -> Failure:
    """A reply that no aioenv server wrote (a proxy, another service) or that it was cut short."""
    message = f"reply with status {status}, {why}: {detail if isinstance(detail, str) else _excerpt(body)}"
    if 200 <= status < 300:
        return Failure("bad_reply", message, status=status, retryable=True)
    return Failure(
        "http_error", message, status=status, retryable=status >= 500, retry_after=_seconds(status, retry_after)
    )


def _seconds(status: int, retry_after: str | None) -> float | None:
    # The header's other form, a date, is no use between machines whose clocks differ.
    if status != 503 or retry_after is None or not retry_after.strip().isascii() or not retry_after.strip().isdigit():
        return None
    return float(retry_after)


def _excerpt(body: bytes) -> str:
    text = body[: 4 * _EXCERPT].decode("utf-8", "replace")
    return repr(text[:_EXCERPT]) + ("…" if len(text) > _EXCERPT else "")


def _data(reply: dict[str, Any]) -> Any:
    if "data" not in reply:
        raise WrongShape("it has no data")
    return reply["data"]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def any_data(reply: dict[str, Any]) -> Any:
    """`/get_info`: whatever the env returned."""
    return _data(reply)


def task_ids(reply: dict[str, Any]) -> list[str]:
    """`/get_env_profile`. Older services put the list under `task_ids`."""
    ids = reply["task_ids"] if "task_ids" in reply and "data" not in reply else _data(reply)
    if not isinstance(ids, list) or not all(isinstance(task_id, str) for task_id in ids):
        raise WrongShape("data is no list of strings")
    return ids


def created(reply: dict[str, Any]) -> dict[str, Any]:
    """`/create`: at least a list of messages under `state` and an object under `info`."""
    data = _data(reply)
    if not isinstance(data, dict):
        raise WrongShape("data is no object")
    state = data.get("state")
    if not isinstance(state, list) or not state or not all(isinstance(message, dict) for message in state):
        raise WrongShape("data.state is no list of messages")
    if not isinstance(data.get("info"), dict):
        raise WrongShape("data.info is no object")
    return data


def stepped(reply: dict[str, Any]) -> dict[str, Any]:
    """`/step`: what `created` asks for, and a reward and is_terminated."""
    data = created(reply)
    if not _is_number(data.get("reward")):
        raise WrongShape("data.reward is no number")
    if not isinstance(data.get("is_terminated"), bool):
        raise WrongShape("data.is_terminated is neither true nor false")
    return data


def score(reply: dict[str, Any]) -> float:
    """`/evaluate`; true and false are taken for 1.0 and 0.0, as some envs score so."""
    value = _data(reply)
    if not _is_number(value):
        raise WrongShape("data is no number")
    return float(value)


def forked(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """`/fork`: a list of objects that each name an instance."""
    data = _data(reply)
    if not isinstance(data, list) or not all(isinstance(branch, dict) for branch in data):
        raise WrongShape("data is no list of objects")
    if not all(isinstance(branch.get("instance_id"), str) for branch in data):
        raise WrongShape("an object in data has no instance_id")
    return data


def checkpointed(reply: dict[str, Any]) -> dict[str, Any]:
    """`/checkpoint` and `/restore`: an object that names a checkpoint."""
    data = _data(reply)
    if not isinstance(data, dict) or not isinstance(data.get("checkpoint"), str):
        raise WrongShape("data is no object with a checkpoint")
    return data


def released(reply: dict[str, Any]) -> bool:
    """`/release`: whether there was such an instance."""
    success = reply.get("success")
    if not isinstance(success, bool):
        raise WrongShape("success is neither true nor false")
    return success
