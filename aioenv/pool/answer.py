"""What a worker process answered: data, an error, or so much that reading it is left to a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aioenv.errors import AioenvError, BadRequest, EnvError, UnknownTask
from aioenv.pool.wire import Body, FrameError, load_object

_ERRORS: dict[str, type[AioenvError]] = {error.code: error for error in (BadRequest, UnknownTask, EnvError)}


class NoAnswer(AioenvError):
    """A process wrote what is no answer to its pipe: it can't be talked to any more."""

    code = "no_answer"


@dataclass(frozen=True)
class Unread:
    """An answer so large that reading it would hold up the event loop: the frame's body, as it came."""

    body: Body


def read_answer(body: Body) -> Any:
    """The data of an answer. Raises what the env raised, NoAnswer where it is none."""
    try:
        answer = load_object(body)
    except FrameError as broken:
        raise NoAnswer(str(broken)) from None
    error = answer.get("error")
    if error is None:
        return answer.get("data")
    if not isinstance(error, dict):
        raise NoAnswer("an answer's error is not an object")
    raise _ERRORS.get(str(error.get("code")), EnvError)(str(error.get("message")))
