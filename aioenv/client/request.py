"""What a call sends: pure functions from arguments to the bytes of a POST."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from aioenv.errors import BadRequest
from aioenv.schema import Message, ToolCall

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY  # what a trainer's params are apt to hold


def text(value: object, name: str) -> str:
    """`value` if it is a non-empty string. Raises BadRequest."""
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} must be a non-empty string, not {value!r:.100}")
    return value


def mapping(value: object, name: str) -> Mapping[Any, Any]:
    """`value` as an object; None is an empty one, a schema Message its `simple_dict()`. Raises BadRequest."""
    if value is None:
        return {}
    if isinstance(value, Message):
        return value.simple_dict()
    if isinstance(value, Mapping):
        return value
    raise BadRequest(f"{name} must be a dict, a Message or None, not {type(value).__name__}")


def texts(value: object, name: str) -> list[str]:
    """`value` as a list of non-empty strings. Raises BadRequest."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise BadRequest(f"{name} must be a list of strings, not {value!r:.100}")
    return [text(item, f"each of {name}") for item in value]


def encode(body: Mapping[str, Any]) -> bytes:
    """`body` as JSON. Raises BadRequest where it has no JSON form."""
    try:
        return orjson.dumps(body, default=_default, option=_OPTIONS)
    except TypeError as error:  # orjson's JSONEncodeError is one; a failing `default` is wrapped in one
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise BadRequest(f"the arguments have no JSON form: {error}{cause}") from error


def _default(value: object) -> Any:
    if isinstance(value, Message | ToolCall):
        return value.simple_dict()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON type")
