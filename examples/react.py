"""A ReAct agent: a model at any OpenAI-compatible endpoint plays AppWorld tasks, several at once.

    python -m aioenv serve --env appworld                          # in another terminal
    export OPENAI_BASE_URL=http://127.0.0.1:8000/v1                # and OPENAI_API_KEY, if there is one
    python examples/react.py --model Qwen/Qwen3-8B --tasks 8

Each turn the model says a thought and a block of Python code, and sees what the code printed; AppWorld's first messages
ask for that. To make it your own, begin with `ReactAgent`, which decides what the model gets to see, and `play`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chat import Chat, ChatError
from context import fit, size

from aioenv.client import EnvClient
from aioenv.schema import ActionMessage, Message, Role, ToolCall, Trajectory

logger = logging.getLogger("react")


class ReactAgent:
    """The conversation so far in, the model's next message out. One for each episode."""

    def __init__(self, chat: Chat, max_context: int) -> None:
        self.chat = chat
        self.max_context = max_context

    async def __call__(self, messages: Sequence[Message]) -> ActionMessage:
        """Raises ChatError where the model gives no answer."""
        chat = to_chat(messages)
        shown = fit(chat, self.max_context)
        while True:
            try:
                return await self.chat.complete(shown)
            except ChatError as error:
                if error.code != "chat_context_too_long":
                    raise
                # Endpoints count tokens, we count characters: what is too long turns out when it is sent.
                self.max_context = size(shown) * 3 // 4
                shorter = fit(chat, self.max_context)
                if size(shorter) >= size(shown):
                    raise
                logger.warning("%d characters are too long for the model: trying %d", size(shown), size(shorter))
                shown = shorter


def to_chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation as endpoints want it: what follows tool calls has to be an answer to each of them."""
    chat: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            # Some endpoints refuse an assistant's message that is empty, and an empty list of tool calls.
            said = {"role": "assistant", "content": message.content or "(nothing)"}
            calls = [sound(call).simple_dict() for call in message.tool_calls]
            chat.append({**said, "tool_calls": calls} if calls else said)
        elif calls:
            # The env runs the first one only, and says so.
            contents = [message.content] + ["Not run."] * (len(calls) - 1)
            pairs = zip(calls, contents, strict=True)
            chat += [{"role": "tool", "tool_call_id": call["id"], "content": content} for call, content in pairs]
            calls = []
        else:
            chat.append({"role": message.role.value, "content": message.content})
    return chat


def sound(call: ToolCall) -> ToolCall:
    """The call, without its arguments if they are no JSON: the env has said so, and some endpoints fail at them."""
    try:
        call.arguments_dict()
    except ValueError:
        return ToolCall(id=call.id, name=call.name)
    return call


async def play(client: EnvClient, chat: Chat, task_id: str, args: argparse.Namespace) -> Trajectory:
    """One episode. Whatever goes wrong becomes the `info["error"]` of its trajectory, so the others go on."""
    began = time.monotonic()
    agent = ReactAgent(chat, args.max_context)
    session = client.session("appworld", task_id)
    try:
        async with asyncio.timeout(args.episode_timeout), session:
            while not session.done and len(session.trajectory.steps) < args.max_steps:
                await session.step(await agent(session.messages()))
            if session.error is None:
                await session.evaluate(sparse=True)
    except ChatError as error:
        session.fail(error.code, str(error))
    except TimeoutError:
        session.fail("deadline", f"the episode took longer than {args.episode_timeout:g} s")
    except Exception as error:
        session.fail("agent_error", repr(error))
        logger.exception("the episode of task %s failed", task_id)
    session.trajectory.info["seconds"] = time.monotonic() - began
    return session.trajectory


async def roll_out(args: argparse.Namespace, client: EnvClient, chat: Chat) -> list[Trajectory]:
    limit = asyncio.Semaphore(args.concurrency)
    ended: list[Trajectory] = []
    async with client, chat:
        # So many tries, because a server that was just started is loading. What fails is logged, and gives no ids.
        task_ids = args.task_ids or (await client.get_env_profile("appworld", args.split, max_retry=20))[: args.tasks]
        if not task_ids:
            raise SystemExit(f"{args.url} gave no tasks of the split {args.split!r}; the log above says why")

        async def limited(task_id: str) -> None:
            async with limit:
                trajectory = await play(client, chat, task_id, args)
            ended.append(trajectory)
            print(f"{len(ended)} of {len(task_ids)} episodes: {task_id} ended", file=sys.stderr)
            if args.trace:
                with args.trace.open("a", encoding="utf-8") as trace:
                    trace.write(json.dumps(trajectory.to_dict()) + "\n")

        async with asyncio.TaskGroup() as group:
            for task_id in task_ids:
                group.create_task(limited(task_id))
    return ended


def show(ended: Sequence[Trajectory]) -> None:
    print(f"{'task':12} {'steps':>5} {'reward':>6} {'seconds':>8}")
    for episode in sorted(ended, key=lambda episode: episode.task_id):
        error = episode.info.get("error")
        # A failed episode has no score: counting it as 0 would be a lie about the model.
        reward = f"{'-':>6}" if error else f"{episode.reward.value:6.2f}"
        why = f"{error['code']}: {error['message']}" if error else ""
        print(f"{episode.task_id:12} {len(episode.steps):5} {reward} {episode.info['seconds']:8.2f}  {why}".rstrip())
    rewards = [episode.reward.value for episode in ended if "error" not in episode.info]
    mean = f"mean reward {sum(rewards) / len(rewards):.2f}" if rewards else "no reward"
    print(f"{len(ended)} episodes, {mean}, {len(ended) - len(rewards)} failed")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("task_ids", nargs="*", help="tasks to play (default: the first --tasks of --split)")
    option("--url", default="http://127.0.0.1:8080", help="the aioenv server (default: %(default)s)")
    option("--split", default="train", help="(default: %(default)s)")
    option("--tasks", type=count, default=8, metavar="N", help="(default: %(default)s)")
    option("--concurrency", type=count, default=8, metavar="N", help="episodes at once (default: %(default)s)")
    option("--max-steps", type=count, default=30, metavar="N", help="turns of an episode (default: %(default)s)")
    option("--episode-timeout", type=float, default=1800.0, metavar="SECONDS", help="(default: %(default)s)")
    option("--trace", type=Path, metavar="FILE", help="append each finished trajectory to FILE, as a line of JSON")
    option = parser.add_argument_group("model").add_argument
    option("--base-url", metavar="URL", help="such as http://127.0.0.1:8000/v1 (default: $OPENAI_BASE_URL)")
    option("--api-key", metavar="KEY", help="is seen by all who list processes (default: $OPENAI_API_KEY)")
    option("--model", required=True, metavar="NAME", help="the model, as the endpoint calls it")
    option("--stream", action=argparse.BooleanOptionalAction, default=True, help="get answers as they are made")
    option("--temperature", type=float, metavar="T", help="(default: the endpoint's)")
    option("--max-tokens", type=count, metavar="N", help="of an answer (default: the endpoint's)")
    option("--extra", type=json_object, default={}, metavar="JSON", help="an object with more keys for each request")
    option("--max-context", type=count, default=120_000, metavar="N", help="characters (default: %(default)s)")
    option("--timeout", type=float, default=300.0, metavar="SECONDS", help="of a request (default: %(default)s)")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    base_url = args.base_url or os.environ.get("OPENAI_BASE_URL", "")
    api_key = args.api_key or os.environ.get("OPENAI_API_KEY", "")
    if not base_url:
        parser.error("which endpoint? Give --base-url, or set OPENAI_BASE_URL")
    sampling = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    options = {key: value for key, value in sampling.items() if value is not None} | args.extra
    try:
        client = EnvClient(args.url)
    except ValueError as wrong:
        parser.error(f"--url: {wrong}")
    try:
        chat = Chat(base_url, args.model, api_key=api_key, stream=args.stream, options=options, timeout=args.timeout)
    except ValueError as wrong:
        parser.error(f"the endpoint: {wrong}")
    try:
        if args.trace:
            args.trace.touch()  # now, rather than when the first episode is over
    except OSError as wrong:
        parser.error(f"--trace: {wrong}")
    try:
        ended = asyncio.run(roll_out(args, client, chat))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    show(ended)
    if all("error" in episode.info for episode in ended):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
