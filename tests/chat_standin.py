"""A stand-in for an OpenAI-compatible chat endpoint: real HTTP, scripted answers, streamed or not, faults on demand.

    python tests/chat_standin.py ROOT

answers as a model that knows the solutions of all tasks in the AppWorld data root ROOT, until it is interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from aioenv.envs.appworld.demo import gold_steps

Messages = list[dict[str, Any]]

# What is refused, by the fault's name: status, headers, and the body's `error`.
REFUSALS: dict[str, tuple[int, dict[str, str], dict[str, Any]]] = {
    "401": (401, {}, {"message": "Incorrect API key provided: KEY.", "code": "invalid_api_key"}),
    "404": (404, {}, {"message": "The model `NAME` does not exist.", "code": "model_not_found"}),
    "400": (400, {}, {"message": "temperature must be at most 2", "code": None}),
    "context": (400, {}, {"message": "This model's maximum context length is 9 tokens.", "code": "context"}),
    "429": (429, {"Retry-After": "0"}, {"message": "Too many requests.", "code": "rate_limit_exceeded"}),
    "429 for good": (429, {}, {"message": "You exceeded your quota.", "code": "insufficient_quota"}),
    "500": (500, {}, {"message": "The engine is gone.", "code": None}),
    "503": (503, {"Retry-After": "0"}, {"message": "Overloaded.", "code": None}),
}
# Faults of the reply itself: the connection ends before or amid it, or it never begins; it ends early as if it were
# whole; it is a page of a gateway, broken JSON, or without an answer; it is an error, behind a status of 200.
BROKEN = ("no reply", "drop", "slow", "short", "page", "broken", "nothing", "error")


class Script(Protocol):
    """Who answers. `name` tells conversations apart, for the faults of each."""

    def name(self, messages: Messages) -> str: ...

    def answer(self, messages: Messages) -> dict[str, Any]: ...


class Gold:
    """Solves the tasks of a data root as their gold solutions do, a step an answer, in one of several `styles`.

    Its code says which step it is, so that it goes on wherever it finds itself, whatever the conversation lacks.
    """

    def __init__(self, root: Path, styles: Mapping[str, str] | None = None) -> None:
        self._tasks = {}
        self._root = root
        self._styles = styles or {}
        for specs in sorted((root / "data" / "tasks").glob("*/specs.json")):
            task = json.loads(specs.read_text(encoding="utf-8"))
            # The three tasks of a scenario may have one instruction, and differ in who gives it.
            self._tasks[specs.parent.name] = (task["supervisor"]["email"], task["instruction"])

    def name(self, messages: Messages) -> str:
        system, user = messages[0]["content"], messages[1]["content"]
        (task_id,) = [
            task_id
            for task_id, (email, instruction) in self._tasks.items()
            if email in system and user.startswith(instruction)
        ]
        return task_id

    def answer(self, messages: Messages) -> dict[str, Any]:
        task_id = self.name(messages)
        said = [message for message in messages if message["role"] == "assistant"]
        step = max((int(number) for number in re.findall(r"# step (\d+)", json.dumps(said))), default=0)
        steps = gold_steps(self._root, task_id)
        code = f"# step {step + 1}\n{steps[min(step, len(steps) - 1)]}"
        thought = f"Schritt für Schritt, 一步一步, 🐾: this is step {step + 1}."
        style = self._styles.get(task_id, "")
        hesitates = not said  # the first answer of some styles is one that the env can do nothing with
        if style == "tool calls":
            call = {"name": "appworld", "arguments": json.dumps({"code": code})}
            other = {"name": "appworld", "arguments": json.dumps({"code": "raise SystemExit"})}
            calls = [{"id": f"call-{n}", "type": "function", "function": f} for n, f in enumerate((call, other))]
            if hesitates:
                calls[0]["function"] = {"name": "appworld", "arguments": '{"code": '}
            return {"content": None, "tool_calls": calls}
        if style == "several blocks":
            return {"content": f"{thought}\n```python\n{code}\n```\nAnd then:\n```python\nraise SystemExit\n```"}
        if style == "no block" and hesitates:
            return {"content": "What a nice task!"}
        if style == "nothing" and hesitates:
            return {"content": None}
        if style == "thinks":
            thought = f"<think>\n```python\nraise SystemExit\n```\nNo, no.\n</think>\n{thought}"
        if style == "cut off":
            return {"content": f"{thought}\n```python\n{code}"}
        return {"content": f"{thought}\n```python\n{code}\n```"}


class StandIn:
    """The endpoint. `requests` are the bodies that it was sent, in their order.

    faults      for a conversation, by its name, what its next requests meet: names of REFUSALS and BROKEN, or "" for
                a good answer. When they are used up, all answers are good
    api_key     if there is one, who comes without is refused
    max_chars   conversations with more characters are refused
    """

    def __init__(
        self,
        script: Script,
        *,
        faults: Mapping[str, Iterator[str]] | None = None,
        api_key: str = "",
        max_chars: int | None = None,
    ) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self._script = script
        self._faults = faults or {}
        self._api_key = api_key
        self._max_chars = max_chars
        self._random = random.Random(0)

    @contextlib.asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[StandIn]:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            yield self
        finally:
            await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        fault = self._fault(request.headers.get("Authorization", ""), body["messages"])
        if fault in REFUSALS:
            status, headers, error = REFUSALS[fault]
            told = error["message"].replace("KEY", request.headers.get("Authorization", "")[len("Bearer ") :])
            error = {**error, "message": told.replace("NAME", body["model"])}
            return web.json_response({"error": error}, status=status, headers=headers)
        if fault == "slow":
            await asyncio.sleep(3600)
        if fault == "no reply":
            _abort(request)
        if fault == "page":
            return web.Response(text="<html>Just a moment…</html>", content_type="text/html")
        message = {"role": "assistant", "content": "", **self._script.answer(body["messages"])}
        if body["stream"]:
            return await self._stream(request, message, fault)
        return await self._whole(request, message, fault)

    def _fault(self, authorization: str, messages: Messages) -> str:
        if self._api_key and authorization != f"Bearer {self._api_key}":
            return "401"
        if self._max_chars is not None and sum(len(message["content"]) for message in messages) > self._max_chars:
            return "context"
        return next(self._faults.get(self._script.name(messages), iter(())), "")

    async def _whole(self, request: web.Request, message: dict[str, Any], fault: str) -> web.StreamResponse:
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body: dict[str, Any] = {"id": "c", "object": "chat.completion", "choices": [choice]}
        if fault == "nothing":
            body["choices"] = []
        if fault == "error":
            body["error"] = {"message": "The engine broke down.", "code": 502}
        content = json.dumps(body, ensure_ascii=False).encode()
        if fault in ("broken", "short"):
            content = content[:-9]
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": f"{len(content)}"})
        await response.prepare(request)
        if fault == "drop":
            await response.write(content[: len(content) // 2])
            _abort(request)
        await response.write(content)
        return response

    async def _stream(self, request: web.Request, message: dict[str, Any], fault: str) -> web.StreamResponse:
        content = self._events(message, fault).encode()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if fault == "drop":
            content = content[: len(content) // 2]
        while content:
            # A few bytes at a time: lines, and characters of several bytes, come in pieces.
            count = self._random.randrange(1, 40)
            await response.write(content[:count])
            await asyncio.sleep(0)
            content = content[count:]
        if fault == "drop":
            _abort(request)
        return response

    def _events(self, message: dict[str, Any], fault: str) -> str:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        text = message["content"] or ""
        deltas += [{"content": text[at : at + 9]} for at in range(0, len(text), 9)]
        for index, call in enumerate(message.get("tool_calls", [])):
            arguments = call["function"]["arguments"]
            deltas.append({"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]})
            for at in range(0, len(arguments), 9):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + 9]}}]})
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        if fault == "nothing":
            return "data: [DONE]\n\n"
        if fault == "short":
            return "".join(map(_event, chunks))
        if fault == "error":
            chunks[len(chunks) // 2 :] = [{"error": {"message": "The engine broke down.", "code": 502}}]
        chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
        chunks += [{"choices": [], "usage": {"total_tokens": 1}}]
        events = list(map(_event, chunks))
        if fault == "broken":
            events[len(events) // 2] = 'data: {"choices": [{"index"\n\n'
        events[1:1] = [": keep-alive\n\n", ":\r\n\r\n", "event: ping\nid: 7\nretry: 10\n\n"]
        return "".join(events) + "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    end = "\r\n" if len(json.dumps(chunk)) % 2 else "\n"
    return f"data: {json.dumps(chunk, ensure_ascii=False)}{end}{end}"


def _abort(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


async def serve(root: Path, port: int) -> None:
    async with StandIn(Gold(root)).running(port) as standin:
        print(f"export OPENAI_BASE_URL={standin.url}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", type=Path, help="the server's AppWorld root")
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(args.root, args.port))


if __name__ == "__main__":
    main()
