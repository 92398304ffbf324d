"""What an agent's message asks to run. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

TOOL = "appworld"
# A fence that is never closed runs to the end: models get cut off.
_PYTHON_BLOCK = re.compile(r"```(?:python|py)[ \t]*\r?\n(.*?)(?:\r?\n[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE)
_ANY_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """Either `code` to run, or the `problem` to tell the agent. `note` is for the agent as well, after the output."""

    code: str | None = None
    problem: str | None = None
    note: str = ""


def parse_action(message: dict[str, Any], simple: bool) -> Action:
    """The code in an assistant's message: of its tool call if it has one, else of its first ```python block.

    In `simple` mode a message without any fence is code as it stands.
    """
    calls = message.get("tool_calls")
    if calls:
        return _from_tool_calls(calls)
    text = _text(message.get("content"))
    found = _PYTHON_BLOCK.search(text)
    if found is None and simple:
        if "```" not in text:
            return Action(code=text) if text.strip() else _no_code(simple)
        found = _ANY_BLOCK.search(text)
    if found is None or not found[1].strip():
        return _no_code(simple)
    return Action(code=found[1])


def _no_code(simple: bool) -> Action:
    how = "Send Python code." if simple else "Put the code to run in a ```python block."
    return Action(problem=f"No code was found in your message, so nothing was run. {how}")


def _text(content: Any) -> str:
    """A message's content: text, or a list of parts as OpenAI has it."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def _from_tool_calls(calls: Any) -> Action:
    call = calls[0] if isinstance(calls, list) else None
    if not isinstance(call, dict):
        return Action(problem="`tool_calls` must be a list of objects with `name` and `arguments`. Nothing was run.")
    function = call["function"] if isinstance(call.get("function"), dict) else call
    name = function.get("name")
    if name != TOOL:
        return Action(problem=f"There is no tool {name!r}: the only one is {TOOL!r}. Nothing was run.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return Action(problem=f"The arguments of the tool call are not valid JSON ({error}). Nothing was run.")
    code = arguments.get("code") if isinstance(arguments, dict) else None
    if not isinstance(code, str) or not code.strip():
        return Action(problem='The arguments of the tool call must be {"code": "…"} with Python code. Nothing was run.')
    note = "" if len(calls) == 1 else f"Only the first of your {len(calls)} tool calls was run: send one at a time."
    return Action(code=code, note=note)
