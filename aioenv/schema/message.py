"""One message of an episode, in the shapes that the protocol and OpenAI-compatible endpoints use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field, StrictStr

from aioenv.schema._compat import Model, before


class Role(StrEnum):
    """Who speaks. The last two are made by context managers on the trainer's side, never by an env."""

    SYSTEM = "system"
    USER = "user"
    TOOL = "tool"
    ASSISTANT = "assistant"
    CONTEXT_ASSISTANT = "context_assistant"
    SUMMARY_ASSISTANT = "summary_assistant"


class ToolCall(Model):
    """One call of a tool that a model asked for.

    Takes the flat form `{"name", "arguments"}` and OpenAI's `{"id", "type", "function": {"name", "arguments"}}`.
    `arguments` may be given as JSON text or as an object and is kept as text, unparsed: a model may well write broken
    JSON, and telling it so is the env's business.
    """

    id: StrictStr = ""
    type: StrictStr = "function"
    name: StrictStr
    arguments: StrictStr = "{}"

    @before
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        call = {key: value for key, value in data.items() if value is not None}
        function = call.get("function")
        if isinstance(function, Mapping):
            call.update({key: function[key] for key in ("name", "arguments") if function.get(key) is not None})
        elif function is not None:
            raise ValueError(f"a tool call's function must be an object, not {type(function).__name__}")
        if "name" not in call:
            raise ValueError("a tool call needs a name, either at its top or under function")
        arguments = call.get("arguments", "{}")
        if isinstance(arguments, Mapping):
            try:
                call["arguments"] = json.dumps(dict(arguments), ensure_ascii=False)
            except TypeError as error:  # pydantic 2 would let it pass through as it is
                raise ValueError(f"arguments have no JSON form: {error}") from error
        elif not isinstance(arguments, str):
            raise ValueError(f"arguments must be JSON text or an object, not {type(arguments).__name__}")
        return call

    def arguments_dict(self) -> dict[str, Any]:
        """The arguments, parsed; empty text counts as no arguments. Raises ValueError if they aren't a JSON object."""
        if not self.arguments.strip():
            return {}
        try:
            parsed = json.loads(self.arguments)
        except ValueError as error:
            raise ValueError(f"the arguments of tool {self.name!r} are not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ValueError(f"the arguments of tool {self.name!r} must be an object, not {type(parsed).__name__}")
        return parsed

    def simple_dict(self) -> dict[str, Any]:
        """OpenAI's nested form; `arguments` is JSON text."""
        return {
            "id": self.id,
            "type": self.type,
            "function": {"name": self.name, "arguments": self.arguments},
        }


class Message(Model):
    """One message of any role.

    `metadata` is for whoever made the message and never goes on the wire. A null `content` (OpenAI sends it beside
    tool calls) is the empty text.
    """

    role: Role
    content: StrictStr = ""
    name: StrictStr | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: StrictStr | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @before
    def _null_is_default(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None}

    def simple_dict(self) -> dict[str, Any]:
        """What goes on the wire: `role` and `content`, and of the other three keys those that are set."""
        simple: dict[str, Any] = {"role": self.role.value, "content": self.content}
        if self.name is not None:
            simple["name"] = self.name
        if self.tool_calls:
            simple["tool_calls"] = [call.simple_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            simple["tool_call_id"] = self.tool_call_id
        return simple


class ActionMessage(Message):
    """What an agent does: `simple_dict()` is the `messages` of `/step`."""

    role: Role = Role.ASSISTANT


class StateMessage(Message):
    """What an env shows: `simple_dict()` is an entry of `state`, and always has `tool_calls`, if empty."""

    role: Role = Role.USER

    def simple_dict(self) -> dict[str, Any]:
        return {**super().simple_dict(), "tool_calls": [call.simple_dict() for call in self.tool_calls]}
