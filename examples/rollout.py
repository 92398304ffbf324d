"""Play many AppWorld episodes at once, with a scripted agent that replays gold solutions.

    python -m aioenv serve --env appworld          # in another terminal
    python examples/rollout.py --episodes 16 --concurrency 8

A real worker has a model in place of `ScriptedAgent`: it is given the messages so far and returns the next one.
The gold solutions are read from the data root, so this runs on the machine that has it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from aioenv.client import EnvClient
from aioenv.envs.appworld.demo import gold_steps
from aioenv.envs.appworld.install import find_root
from aioenv.schema import ActionMessage, StateMessage


class ScriptedAgent:
    """Says the task's gold solution, a block of code a turn, whatever it is told."""

    def __init__(self, root: Path, task_id: str) -> None:
        self._blocks = iter(gold_steps(root, task_id))

    async def act(self, messages: Iterable[StateMessage]) -> ActionMessage:
        return ActionMessage(content=f"```python\n{next(self._blocks)}\n```")


@dataclass
class Episode:
    task_id: str
    steps: int = 0
    reward: float = 0.0
    seconds: float = 0.0
    error: str = ""


async def play(client: EnvClient, root: Path, task_id: str, max_steps: int) -> Episode:
    """One episode. A fault ends it with its `error`; it never raises, so the others go on."""
    began = time.monotonic()
    episode = Episode(task_id)
    reply = await client.create_instance("appworld", task_id)
    instance_id = reply["info"]["instance_id"]
    try:
        agent = ScriptedAgent(root, task_id)
        while not reply["is_terminated"] and episode.steps < max_steps and not reply["info"].get("fallback"):
            action = await agent.act(StateMessage(**message) for message in reply["state"])
            reply = await client.step(instance_id, action.simple_dict())
            episode.steps += 1
        if reply["info"].get("fallback"):
            episode.error = reply["info"]["error"]["message"]
        else:
            score = await client.evaluate(instance_id, params={"sparse": True})
            episode.reward = float(score)
            episode.error = score.error["message"] if score.error else ""
    finally:
        await client.release_instance(instance_id)
        episode.seconds = time.monotonic() - began
    return episode


async def until_ready(client: EnvClient) -> None:
    """A server that has just been started loads for a while, and so may one that is restarted."""
    if not await client.wait_ready(timeout=120):
        raise SystemExit(f"{client.base_url} is not ready: is `python -m aioenv serve --env appworld` running?")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


async def roll_out(args: argparse.Namespace) -> list[Episode]:
    root = find_root(args.root or os.environ.get("APPWORLD_ROOT"), lambda line: print(line, file=sys.stderr))
    limit = asyncio.Semaphore(args.concurrency)
    async with EnvClient(args.url) as client:
        await until_ready(client)
        task_ids = await client.get_env_profile("appworld", args.split)
        if not task_ids:
            raise SystemExit(f"{args.url} has no tasks in the split {args.split!r}; the log above says why")

        async def limited(number: int) -> Episode:
            async with limit:
                return await play(client, root, task_ids[number % len(task_ids)], args.max_steps)

        running = [asyncio.create_task(limited(number)) for number in range(args.episodes)]
        return [await done for done in tqdm(asyncio.as_completed(running), total=len(running), unit="episode")]


def show(episodes: list[Episode]) -> None:
    print(f"{'task':12} {'steps':>5} {'reward':>6} {'seconds':>8}")
    for episode in sorted(episodes, key=lambda episode: episode.task_id):
        print(f"{episode.task_id:12} {episode.steps:5} {episode.reward:6.2f} {episode.seconds:8.2f}  {episode.error}")
    # A failed episode has no reward: counting it as 0 would be a lie about the agent.
    rewards = [episode.reward for episode in episodes if not episode.error]
    mean = f"mean reward {sum(rewards) / len(rewards):.2f}" if rewards else "no reward"
    print(f"{len(episodes)} episodes, {mean}, {len(episodes) - len(rewards)} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="(default: %(default)s)")
    parser.add_argument("--root", help="the server's AppWorld root, for the gold solutions (default: the demo data)")
    parser.add_argument("--split", default="train", help="(default: %(default)s)")
    parser.add_argument("--episodes", type=count, default=16, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=count, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--max-steps", type=count, default=30, metavar="N", help="(default: %(default)s)")
    args = parser.parse_args()
    try:
        show(asyncio.run(roll_out(args)))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
