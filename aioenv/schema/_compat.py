"""The few places where pydantic 1.10 and 2 differ for us. Nothing else in aioenv asks for the version.

Names that only one version has are looked up by name at run time: neither version's type checker, nor its
deprecation warnings, then sees the other's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pydantic
from pydantic import BaseModel

PYDANTIC_2 = pydantic.VERSION.startswith("2.")

_PRE_VALIDATOR = "model_validator" if PYDANTIC_2 else "root_validator"
_DUMP_JSON = "model_dump_json" if PYDANTIC_2 else "json"


def before(function: Callable[[Any, Any], Any]) -> Any:
    """Decorate `function(cls, data)` to rewrite a model's raw input ahead of its fields.

    `data` is a dict, or under pydantic 2 also anything else that a caller passed in a model's place: return that as
    it is. A ValueError becomes pydantic's ValidationError, which is a ValueError; raise no TypeError, since only
    pydantic 1 turns that into one.
    """
    decorate = getattr(pydantic, _PRE_VALIDATOR)
    if PYDANTIC_2:
        return decorate(mode="before")(classmethod(function))
    return decorate(pre=True, allow_reuse=True)(function)


class Model(BaseModel):
    """Base of the schema: unknown keys are ignored, wrong types are a ValidationError (a ValueError)."""

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain JSON types; `type(self)(**that)` gives an equal model.

        Raises TypeError or ValueError where `info` or `metadata` holds something that JSON has no form for.
        """
        text: str = getattr(self, _DUMP_JSON)()
        plain: dict[str, Any] = json.loads(text)
        return plain
