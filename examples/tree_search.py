"""Solve AppWorld tasks by best-first search over steps of code, with an agent that is wrong more often than right.

    python -m aioenv serve --env appworld          # in another terminal
    python examples/tree_search.py

Each task is played twice, by the same agent with the same budget of steps: in a line, where a wrong step can't be taken
back, and as a tree, where each step is taken on a branch of the world. A real search has a model in place of
`ScriptedAgent`, and a value model in place of `Node.value`.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import os
import random
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from aioenv.client import EnvClient
from aioenv.client.session import Session
from aioenv.envs.appworld.demo import gold_steps
from aioenv.envs.appworld.install import find_root

MISTAKES = {
    "apis.supervisor.complete_task()": "ends the episode too early",
    "apis = None": "breaks the world, which nobody notices until the next step",
    "print(apis.api_docs.show_app_descriptions())": "leads nowhere",
}


@dataclass
class Node:
    """A world after some steps."""

    session: Session
    code: str = ""  # the last step
    progress: int = 0  # steps of the agent's plan that succeeded
    wasted: int = 0  # steps that did not help, and attempts to go on from here
    children: list[Node] = field(default_factory=list)

    @property
    def value(self) -> float:
        return self.progress - 0.5 * self.wasted

    @property
    def solved(self) -> bool:
        return self.session.done and self.session.error is None and self.session.reward == 1.0

    def __lt__(self, other: Node) -> bool:
        return self.value > other.value  # heapq gives the least first


class ScriptedAgent:
    """Has a plan, the task's gold solution, and proposes its next step or, more often than not, a mistake."""

    def __init__(self, root: Path, task_id: str, mistakes: float, seed: int) -> None:
        self._plan = gold_steps(root, task_id)
        self._mistakes = mistakes
        self._random = random.Random(f"{seed} {task_id}")

    def propose(self, node: Node) -> str:
        if self._random.random() < self._mistakes:
            return self._random.choice(list(MISTAKES))
        return self._plan[min(node.progress, len(self._plan) - 1)]

    async def act(self, node: Node, code: str) -> None:
        """Take the step in the node's world, and see how it went."""
        node.code = code
        reply = await node.session.step(f"```python\n{code}\n```", params={"sparse": True})
        succeeded = "Execution failed" not in reply["state"][0]["content"]
        if succeeded and code == self._plan[min(node.progress, len(self._plan) - 1)]:
            node.progress += 1
        else:
            node.wasted += 1


async def play_line(session: Session, agent: ScriptedAgent, budget: int) -> Node:
    """One step after the other in one world."""
    node = Node(session)
    while not session.done and budget:
        await agent.act(node, agent.propose(node))
        budget -= 1
    return node


async def search(stack: AsyncExitStack, root: Node, agent: ScriptedAgent, budget: int, width: int) -> Node:
    """The best node when the task is solved or the budget used up. `stack` releases the branches at its end."""
    best, open_nodes = root, [root]
    while open_nodes and budget and not best.solved:
        node = heapq.heappop(open_nodes)
        sessions = await node.session.branch(min(width, budget))
        budget -= len(sessions)
        node.children += (new := [Node(session, "", node.progress, node.wasted) for session in sessions])
        for child in new:
            await stack.enter_async_context(child.session)
        await asyncio.gather(*(agent.act(child, agent.propose(child)) for child in new))
        node.wasted += 1  # going on from here again is worth less, but not nothing
        for open_node in (node, *(child for child in new if not child.session.done)):
            heapq.heappush(open_nodes, open_node)
        best = min([best, *new], key=lambda node: (not node.solved, node))
    return best


def show(node: Node, best: Node, depth: int = 0) -> None:
    if depth:
        line = node.code.strip().partition("\n")[0]
        told = MISTAKES.get(node.code, "a step of the plan") if not node.solved else "solved"
        mark = "=>" if node is best else "  "
        print(f"{mark}{'  ' * depth}{line if len(line) <= 50 else line[:47] + '...'}   {node.value:.1f}, {told}")
    for child in node.children:
        show(child, best, depth + 1)


def count(root: Node) -> int:
    """Steps taken in a tree."""
    return sum(1 + count(child) for child in root.children)


async def solve(client: EnvClient, data: Path, task_id: str, args: argparse.Namespace) -> tuple[bool, bool]:
    """Whether the line solved the task, and whether the tree did."""
    async with client.session("appworld", task_id) as session:
        agent = ScriptedAgent(data, task_id, args.mistakes, args.seed)
        line = await play_line(session, agent, args.budget)
    async with AsyncExitStack() as stack:
        root = Node(await stack.enter_async_context(client.session("appworld", task_id)))
        agent = ScriptedAgent(data, task_id, args.mistakes, args.seed)
        best = await search(stack, root, agent, args.budget, args.width)
    taken = len(line.session.trajectory.steps)
    print(f"\n{task_id}, of {args.budget} steps:")
    last = line.code.partition("\n")[0]
    print(f"  in a line {taken} were taken, the last one `{last}`: {'' if line.solved else 'not '}solved")
    print(f"  in a tree {count(root)} were taken: {'' if best.solved else 'not '}solved")
    show(root, best)
    return line.solved, best.solved


async def run(args: argparse.Namespace) -> None:
    data = find_root(args.root or os.environ.get("APPWORLD_ROOT"), lambda line: print(line, file=sys.stderr))
    async with EnvClient(args.url) as client:
        task_ids = (await client.get_env_profile("appworld", args.split))[:: args.every][: args.tasks]
        if not task_ids:
            raise SystemExit(f"{args.url} has no tasks in the split {args.split!r}; the log above says why")
        solved = [await solve(client, data, task_id, args) for task_id in task_ids]
    lines, trees = (sum(column) for column in zip(*solved, strict=True))
    print(f"\n{len(solved)} tasks: {lines} solved in a line, {trees} in a tree")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="(default: %(default)s)")
    parser.add_argument("--root", help="the server's AppWorld root, for the gold solutions (default: the demo data)")
    parser.add_argument("--split", default="train", help="(default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--every", type=int, default=3, metavar="N", help="take each Nth task (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=45, metavar="N", help="steps of a run (default: %(default)s)")
    parser.add_argument("--width", type=int, default=3, metavar="N", help="branches of a node (default: %(default)s)")
    parser.add_argument("--mistakes", type=float, default=0.6, metavar="P", help="their share (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the agent (default: %(default)s)")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
