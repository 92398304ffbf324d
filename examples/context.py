"""Keep a conversation within what a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Characters that are left of an observation that is long past.
STUB = 300


def fit(chat: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """The conversation in about `limit` characters, or as few as can be.

    The task and the last turn stay. As far as need be, long observations are cut to a quarter of the limit, then all
    but the last one to a stub, the oldest first; then the oldest turns are left out.
    """
    task: list[dict[str, Any]] = []
    turns: list[list[dict[str, Any]]] = []  # each is what the model said, and what it was told
    for message in chat:
        if message["role"] == "assistant":
            turns.append([])
        (turns[-1] if turns else task).append(message)

    def excess() -> int:
        return size([*task, *(message for turn in turns for message in turn)]) - limit

    for keep, to_cut in ((max(limit // 4, STUB), turns), (STUB, turns[:-1])):
        for turn in to_cut:
            if excess() > 0:
                turn[1:] = [{**told, "content": shortened(told["content"], keep)} for told in turn[1:]]
    left_out = 0
    while excess() > 0 and len(turns) > 1:
        del turns[0]
        left_out += 1
    if left_out:
        note = f"{task[-1]['content']}\n\n[Earlier turns left out here: {left_out}]"
        task[-1] = {**task[-1], "content": note}
    return [*task, *(message for turn in turns for message in turn)]


def size(chat: Sequence[dict[str, Any]]) -> int:
    """Characters that the model has to read."""
    calls = [call["function"]["arguments"] for message in chat for call in message.get("tool_calls", ())]
    return sum(len(message["content"]) for message in chat) + sum(map(len, calls))


def shortened(text: str, keep: int) -> str:
    """The text's beginning and end, `keep` characters in all."""
    cut = len(text) - keep
    return text if cut <= 0 else f"{text[: keep // 2]}\n[… {cut} characters …]\n{text[-(keep // 2) :]}"
