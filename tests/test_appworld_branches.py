"""Branches and checkpoints of the real AppWorld engine, on demo data, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Caller, Reply, caller, serve_command

from aioenv.envs.appworld.demo import gold_steps

SPLITS = ("train", "dev", "test_normal", "test_challenge")
# To tell worlds apart by what an app holds.
LOGIN = (
    "passwords = {p['account_name']: p['password'] for p in apis.supervisor.show_account_passwords()}\n"
    "email = apis.supervisor.show_profile()['email']\n"
    "token = apis.simple_note.login(username=email, password=passwords['simple_note'])['access_token']\n"
    "def write(title):\n"
    "    apis.simple_note.create_note(title=title, content='zanzibar', access_token=token)\n"
    "def written():\n"
    "    notes = apis.simple_note.search_notes(query='zanzibar', access_token=token, page_limit=20)\n"
    "    return sorted(note['title'] for note in notes if note['title'].startswith('at '))\n"
)
CLOCK = "from datetime import datetime\nprint(datetime.now().isoformat())"
DRAW = "import random\nprint([random.random() for _ in range(3)], random.sample(range(1000), 3))"


def first_tasks(root: Path) -> list[str]:
    """One of each scenario."""
    lines = [line for split in SPLITS for line in (root / f"data/datasets/{split}.txt").read_text().split()]
    return [task_id for task_id in lines if task_id.endswith("_1")]


class Worlds:
    """Those of one task, all released at the end."""

    def __init__(self, call: Caller, root: Path) -> None:
        self.call = call
        self.root = root
        self.made: list[str] = []

    async def create(self, name: str, task_id: str | None = None) -> str:
        self.made.append(name)
        return await self.call.create(name, env_type="appworld", task_id=task_id or first_tasks(self.root)[0])

    async def fork(self, source: str, *names: str) -> None:
        self.made += names
        data = (await self.call.post("fork", instance_id=source, params={"instance_ids": names})).data
        assert [branch["instance_id"] for branch in data] == list(names)

    async def say(self, name: str, code: str) -> Any:
        return (await self.call.say(name, f"```python\n{code}\n```")).data

    async def run(self, name: str, code: str) -> str:
        """What it prints."""
        content = str((await self.say(name, code))["state"][0]["content"])
        assert "Execution failed" not in content, content
        return content.removeprefix("Output:\n```\n").removesuffix("\n```")

    async def score(self, name: str) -> tuple[float, float]:
        """Dense and sparse."""
        replies = [
            await self.call.post("evaluate", instance_id=name, params={"sparse": sparse}) for sparse in (False, True)
        ]
        dense, sparse = (reply.data for reply in replies)
        return dense, sparse

    async def checkpoint(self, name: str, **params: Any) -> str:
        return str((await self.call.post("checkpoint", instance_id=name, params=params)).data["checkpoint"])

    async def restore(self, name: str, checkpoint: str) -> Reply:
        return await self.call.post("restore", instance_id=name, params={"checkpoint": checkpoint})

    async def release(self, *names: str) -> None:
        for name in names:
            self.made.remove(name)
            assert (await self.call.post("release", instance_id=name)).body["success"] is True


@pytest.fixture
async def worlds(appworld: Caller, demo_root: Path) -> AsyncIterator[Worlds]:
    worlds = Worlds(appworld, demo_root)
    try:
        yield worlds
    finally:
        await asyncio.gather(*(appworld.post("release", instance_id=name) for name in worlds.made))


async def test_a_branch_begins_as_its_source_and_goes_its_own_way(worlds: Worlds) -> None:
    await worlds.create("source")
    await worlds.run("source", LOGIN + "x = [1]\nwrite('at source')")
    await worlds.run("source", DRAW)
    await worlds.fork("source", "one", "two")
    names = ("two", "source", "one")
    for code in ("print(x, written(), email)", CLOCK, DRAW, DRAW):
        assert len({await worlds.run(name, code) for name in names}) == 1, code
    for name in names:
        await worlds.run(name, f"x.append('{name}')\nwrite('at {name} later')\nonly_{name} = 1")
    for name in names:
        assert await worlds.run(name, "print(x[1:])") == f'["{name}"]'
        assert set(json.loads(await worlds.run(name, "print(written())"))) == {"at source", f"at {name} later"}
        unknown = "source" if name == "one" else "one"
        assert "NameError" in (await worlds.say(name, f"only_{unknown}"))["state"][0]["content"]


async def test_each_side_scores_what_it_did(worlds: Worlds) -> None:
    limit = asyncio.Semaphore(3)

    async def check(number: int, task_id: str) -> None:
        async with limit:
            await branch_and_score(worlds, number, task_id)

    await asyncio.gather(*(check(*numbered) for numbered in enumerate(first_tasks(worlds.root))))


async def branch_and_score(worlds: Worlds, number: int, task_id: str) -> None:
    source, branch, alone = (f"{name}{number}" for name in ("source", "branch", "alone"))
    *steps, last = gold_steps(worlds.root, task_id)
    for name in (alone, source):
        await worlds.create(name, task_id)
        for code in steps:
            await worlds.say(name, code)
    expected = await worlds.score(alone)
    if number % 2:  # scoring loads what the engine keeps: before the copy was made it must not matter either
        assert await worlds.score(source) == expected, task_id
    await worlds.fork(source, branch)
    assert await worlds.score(branch) == expected, task_id
    done = await worlds.say(branch, last)
    assert (done["is_terminated"], done["reward"], done["info"]["step"]) == (True, 1.0, len(steps) + 1), task_id
    assert await worlds.score(source) == expected, task_id
    assert (await worlds.say(source, "x = 1"))["is_terminated"] is False
    assert await worlds.score(branch) == (1.0, 1.0), task_id
    # The source ends its own way, and scores as one that was never copied.
    for name in (alone, source):
        await worlds.say(name, last if number % 3 else "apis.supervisor.complete_task(status='fail')")
    assert await worlds.score(source) == await worlds.score(alone), task_id
    assert await worlds.score(branch) == (1.0, 1.0), task_id
    await worlds.release(source, branch, alone)


async def test_a_branch_outlives_its_source_and_its_group(demo_root: Path, tmp_path: Path) -> None:
    """On a server that keeps one group template: what the branch began as is gone, its folder too."""
    options = ("--env", "appworld", "--root", str(demo_root), "--scratch", str(tmp_path), "--group-templates", "1")
    kept = tmp_path / "kept"
    with serve_command(*options, "--keep-outputs", str(kept)) as (url, _):
        async with caller(url) as call:
            worlds = Worlds(call, demo_root)
            task_id, other = first_tasks(demo_root)[:2]
            *steps, last = gold_steps(demo_root, task_id)
            await worlds.create("source", task_id)
            for code in steps:
                await worlds.say("source", code)
            await worlds.score("source")
            await worlds.fork("source", "child")
            await worlds.fork("child", "grandchild")
            await worlds.release("source", "child")
            await worlds.create("other", other)
            (scratch,) = tmp_path.glob("aioenv-*")
            async with asyncio.timeout(20):
                while {folder.name for folder in (scratch / "worlds").iterdir()} != {"other", "grandchild"}:
                    await asyncio.sleep(0.05)
            assert (await worlds.score("grandchild"))[1] == 0.0
            assert (await worlds.say("grandchild", last))["reward"] == 1.0
            assert await worlds.score("grandchild") == (1.0, 1.0)
            await worlds.release("grandchild", "other")
        # Each has its own outputs, with what its source had written, and none of another's.
        for name in ("source", "child", "grandchild"):
            (outputs,) = (kept / name / "experiments/outputs").iterdir()
            assert outputs.name == name
            (log,) = outputs.glob("tasks/*/logs/environment_io.md")
            assert log.read_text().count("### Environment Interaction") == len(steps) + (name == "grandchild")
            assert len(list(outputs.glob("tasks/*/evaluation/report.md"))) == 1


async def test_branches_of_branches_ten_deep(worlds: Worlds) -> None:
    await worlds.create("b0")
    await worlds.run("b0", LOGIN + "path = [0]")
    for depth in range(1, 11):
        await worlds.fork(f"b{depth - 1}", f"b{depth}")
        await worlds.run(f"b{depth}", f"path.append({depth})\nwrite('at {depth}')")
        if depth > 1:
            await worlds.release(f"b{depth - 1}")
    assert await worlds.run("b10", "print(path)") == str(list(range(11)))
    titles = sorted(f"at {depth}" for depth in range(1, 11))
    assert await worlds.run("b10", "print(' '.join(written()))") == " ".join(titles)
    assert await worlds.run("b0", "print(path, written())") == "[0] []"
    for code in gold_steps(worlds.root, first_tasks(worlds.root)[0]):
        await worlds.say("b10", code)
    dense, _ = await worlds.score("b10")
    assert dense > (await worlds.score("b0"))[0]


async def test_32_branches_at_once(worlds: Worlds) -> None:
    *steps, last = gold_steps(worlds.root, first_tasks(worlds.root)[0])
    await worlds.create("source")
    for code in steps:
        await worlds.say("source", code)
    before = await worlds.score("source")
    names = [f"b{number}" for number in range(32)]
    await worlds.fork("source", *names)
    drawn = await asyncio.gather(*(worlds.run(name, DRAW) for name in names))
    assert len(set(drawn)) == 1
    # Half of them solve it, all at the same time.
    await asyncio.gather(*(worlds.say(name, last if number % 2 else "x = 1") for number, name in enumerate(names)))
    scores = await asyncio.gather(*(worlds.score(name) for name in names))
    assert scores == [before, (1.0, 1.0)] * 16
    assert await worlds.score("source") == before


async def test_going_back_undoes_wrong_steps(worlds: Worlds) -> None:
    *steps, last = gold_steps(worlds.root, first_tasks(worlds.root)[0])
    await worlds.create("world")
    start = await worlds.checkpoint("world")
    for code in steps:
        await worlds.say("world", code)
    await worlds.run("world", LOGIN)
    middle = await worlds.checkpoint("world")
    before = await worlds.score("world")
    drawn = await worlds.run("world", DRAW)
    for wrong in ("write('at a wrong place')", "apis.supervisor.complete_task(status='fail')", "raise SystemExit"):
        await worlds.say("world", wrong)
        await worlds.score("world")
        assert (await worlds.restore("world", middle)).data["step"] == len(steps) + 1
        assert await worlds.run("world", "print(written())") == "[]"
        assert await worlds.score("world") == before
        assert await worlds.run("world", DRAW) == drawn
    done = await worlds.say("world", last)
    assert (done["is_terminated"], done["reward"]) == (True, 1.0)
    await worlds.restore("world", start)
    for code in (*steps, last):
        done = await worlds.say("world", code)
    assert (done["is_terminated"], done["reward"], done["info"]["step"]) == (True, 1.0, len(steps) + 1)
    assert await worlds.score("world") == (1.0, 1.0)


async def test_a_kept_checkpoint_brings_an_ended_world_back(worlds: Worlds) -> None:
    *steps, last = gold_steps(worlds.root, first_tasks(worlds.root)[0])
    await worlds.create("world")
    for code in steps:
        await worlds.say("world", code)
    kept = await worlds.checkpoint("world", keep=True, ttl=60)
    await worlds.release("world")
    worlds.made.append("world")
    assert (await worlds.restore("world", kept)).data["step"] == len(steps)
    assert (await worlds.say("world", last))["reward"] == 1.0
    assert await worlds.score("world") == (1.0, 1.0)


def test_the_example_solves_with_branches_what_it_does_not_in_a_line(appworld_url: str, demo_root: Path) -> None:
    example = Path(__file__).parent.parent / "examples/tree_search.py"
    command = [sys.executable, str(example), "--url", appworld_url, "--root", str(demo_root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "3 tasks: 0 solved in a line, 3 in a tree" in done.stdout
    assert done.stdout.count("=>") == 3
    bad = subprocess.run([*command, "--split", "nope"], capture_output=True, text=True, timeout=120)
    assert (bad.returncode, "Traceback" in bad.stderr) == (1, False)
