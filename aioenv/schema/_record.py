"""What the models of the training side share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from aioenv.schema._compat import Model
from aioenv.schema.message import Message


class Record(Model):
    """A model whose copies never share a list or a dict with it, under either pydantic.

    `copy.copy` copies these one level deep: what is inside of a `metadata` is shared until `copy.deepcopy`.
    """

    def __copy__(self) -> Self:
        state = {key: copy.copy(value) for key, value in self.__getstate__().items()}
        state["__dict__"] = own(state["__dict__"])
        twin = type(self).__new__(type(self))
        twin.__setstate__(state)
        return twin

    def copy(self, **options: Any) -> Self:
        """pydantic 1's method, with its options; pydantic 2 has it too, but warns that it is old."""
        return super(Record, copy.copy(self)).copy(**options)


def own(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes for a copy of an object: its lists, dicts and models copied one level deep, all else the same."""
    return {
        name: copy.copy(value) if isinstance(value, (list, dict, Model)) else value
        for name, value in attributes.items()
    }


def plain(message: Any) -> dict[str, Any]:
    """A message as a dict that is its caller's own. Raises ValueError if it is neither a Message nor a dict."""
    if isinstance(message, Message):
        return message.simple_dict()
    if not isinstance(message, Mapping):
        raise ValueError(f"a message must be a dict, not {type(message).__name__}")
    return dict(message)
