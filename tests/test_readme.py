"""The README's examples do what it says."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import Caller

from aioenv.client import EnvClient
from aioenv.schema import Message

README = Path(__file__).parent.parent / "README.md"
GIVE_UP = "```python\napis.supervisor.complete_task()\n```"


def python_blocks(heading: str) -> list[str]:
    """The code below a heading, up to the next one."""
    text = README.read_text(encoding="utf-8")
    section = text.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    return [part.split("```", 1)[0] for part in section.split("```python\n")[1:]]


async def run(code: str, **names: Any) -> dict[str, Any]:
    """Run what is written for the inside of an async function; its variables."""
    body = textwrap.indent(code + "\nreturn locals()", "    ")
    source = f"async def example({', '.join(names)}):\n{body}\n"
    scope: dict[str, Any] = {}
    exec(source, scope)
    variables: dict[str, Any] = await scope["example"](**names)
    return variables


async def test_branches(appworld: Caller, appworld_url: str) -> None:
    (code,) = python_blocks("## Branches")
    async with EnvClient(appworld_url) as client:
        task_id = (await client.get_env_profile("appworld"))[0]
        async with client.session("appworld", task_id) as session:
            variables = await run(code, session=session, agent=agent)
            assert [branch.error for branch in variables["branches"]] == [None] * 4
            assert all(branch.done for branch in variables["branches"])
            assert (session.error, session.done, len(session.trajectory.steps)) == (None, False, 0)


async def agent(messages: list[Message]) -> str:
    assert messages[0].role == "system"
    return GIVE_UP


@pytest.mark.parametrize("number", [0, 1], ids=["session", "rollout"])
async def test_sessions_and_rollouts(
    appworld: Caller, appworld_url: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code = python_blocks("### Sessions and rollouts")[number]
    async with EnvClient(appworld_url) as client:
        task_ids = (await client.get_env_profile("appworld"))[:3]
        names = {"client": client, "agent": agent, "task_id": task_ids[0], "task_ids": task_ids}
        variables = await run(code, **names)
    if number == 0:
        assert variables["session"].error is None
        assert (variables["session"].done, variables["score"]) == (True, 0.0)
    else:
        lines = capsys.readouterr().out.splitlines()
        assert sorted(line.split()[0] for line in lines) == sorted(task_ids)
        assert all(line.split()[1] == "1" for line in lines)
