"""Group templates: the worlds of one task are copies of one, and yet each is its own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Server, served


async def ask(server: Server, instance_id: str, content: str = "tell") -> dict[str, Any]:
    told = (await server.call.say(instance_id, content)).data["state"][0]["content"]
    assert isinstance(told, dict)
    return told


def groups(server: Server) -> int:
    return int(server.pool.readiness()["group_templates"])


async def test_creates_of_one_task_fork_one_world_that_was_made_once() -> None:
    async with served("group") as server:
        replies = await asyncio.gather(
            *(server.call.post("create", task_id="t", instance_id=f"i{n}", params={"sleep": 0.2}) for n in range(8))
        )
        assert len({reply.data["state"][0]["content"] for reply in replies}) == 1
        told = [await ask(server, f"i{n}") for n in range(8)]
        assert len({one["made_in"] for one in told}) == 1
        assert len({one["pid"] for one in told}) == 8
        for number, one in enumerate(told):
            assert one["id"] == f"i{number}"
            assert one["cwd"] == str(server.pool.scratch / "worlds" / f"i{number}")
            assert one["events"] == ["made", "observed", "before_fork", "after_fork"]
            assert one["notes"] == ["tell"]
        assert groups(server) == 1


async def test_copies_go_their_own_ways() -> None:
    async with served("group") as server:
        await server.call.create("one")
        await ask(server, "one", "mine")
        await server.call.create("two")
        assert (await ask(server, "two"))["notes"] == ["tell"]
        assert (await ask(server, "one"))["notes"] == ["mine", "tell"]
        os.kill((await ask(server, "one"))["pid"], signal.SIGKILL)
        assert (await server.call.post("evaluate", instance_id="two")).data == 1.0


async def test_another_task_or_other_params_are_another_group() -> None:
    async with served("group") as server:
        for name, body in [
            ("a", {"task_id": "t"}),
            ("b", {"task_id": "u"}),
            ("c", {"task_id": "t", "params": {"x": 1, "y": 2}}),
            ("d", {"task_id": "t", "params": {"y": 2, "x": 1}}),
        ]:
            await server.call.create(name, **body)
        made_in = {name: (await ask(server, name))["made_in"] for name in "abcd"}
        assert len(set(made_in.values())) == 3
        assert made_in["c"] == made_in["d"]


async def test_the_least_recently_used_group_goes_and_its_worlds_live_on() -> None:
    async with served("group", group_templates=2) as server:
        for name in ("a", "b"):
            await server.call.create(name, task_id=name)
        await server.call.create("a2", task_id="a")
        await server.call.create("c", task_id="c")
        made_in = {name: (await ask(server, name))["made_in"] for name in ("a", "b", "a2", "c")}
        async with asyncio.timeout(10):
            while psutil.pid_exists(made_in["b"]):
                await asyncio.sleep(0.02)
        assert psutil.pid_exists(made_in["a"])
        assert groups(server) == 2
        assert (await ask(server, "b"))["made_in"] == made_in["b"]
        # The death of a world whose parent is gone is noticed, and told, as any other.
        reply = await server.call.say("b", "exit")
        assert reply.error["message"] == "instance b is gone: its process exited with code 3"


async def test_0_turns_group_templates_off() -> None:
    async with served("group", group_templates=0) as server:
        for name in ("a", "b"):
            await server.call.create(name)
            told = await ask(server, name)
            assert told["made_in"] == told["pid"]
            assert told["events"] == ["made", "observed"]
        assert groups(server) == 0


async def test_an_env_that_does_not_opt_in_is_not_copied() -> None:
    async with served("odd") as server:
        await server.call.create()
        assert groups(server) == 0


async def test_idle_groups_go() -> None:
    async with served("group", group_ttl=0.3, reap_interval=0.1) as server:
        await server.call.create("a")
        made_in = (await ask(server, "a"))["made_in"]
        async with asyncio.timeout(10):
            while psutil.pid_exists(made_in) or list((server.pool.scratch / "groups").iterdir()):
                await asyncio.sleep(0.02)
        assert groups(server) == 0
        await server.call.create("b")
        assert (await ask(server, "b"))["made_in"] != made_in


@pytest.mark.parametrize(("task", "message"), [("raise", "raised in the constructor"), ("wake fails", "in after_fork")])
async def test_a_failure_is_told_to_each_create_and_leaves_nothing(task: str, message: str) -> None:
    async with served("group") as server:
        replies = await asyncio.gather(*(server.call.post("create", task_id=task) for _ in range(4)))
        for reply in replies:
            assert (reply.status, reply.error["code"]) == (500, "env_error")
            assert message in reply.error["message"]
        assert (await server.call.get("instances")).body == []
        assert list((server.pool.scratch / "worlds").iterdir()) == []
        assert groups(server) == (1 if task == "wake fails" else 0)


async def test_a_group_that_hangs_is_ended_by_the_limit_of_a_create() -> None:
    async with served("group", limits={"create_timeout": 0.5}) as server:
        reply = await server.call.post("create", task_id="hang")
        assert (reply.status, reply.error["code"]) == (504, "step_timeout")
        async with asyncio.timeout(10):
            while groups(server) or list((server.pool.scratch / "groups").iterdir()):  # the folder goes last
                await asyncio.sleep(0.02)
        await server.call.create("fine")


async def test_a_group_that_died_is_made_again() -> None:
    async with served("group") as server:
        await server.call.create("a")
        made_in = (await ask(server, "a"))["made_in"]
        os.kill(made_in, signal.SIGKILL)
        await server.call.create("b")
        assert (await ask(server, "b"))["made_in"] != made_in
        assert (await ask(server, "a"))["made_in"] == made_in


async def test_outputs_put_off_are_saved_when_they_are_kept(tmp_path: Path) -> None:
    async with served("group", keep_outputs=tmp_path / "kept") as server:
        await server.call.create("a")
        await ask(server, "a", "written")
        await server.call.post("release", instance_id="a")
    assert (tmp_path / "kept/a/notes.txt").read_text() == "written"


async def test_a_burst_of_creates_is_admitted_in_order_and_steps_go_on_meanwhile() -> None:
    async with served("group", group_templates=0) as server:
        await server.call.create("living")
        order: list[int] = []

        async def create(number: int) -> None:
            await server.call.create(f"i{number}", params={"sleep": 0.3})
            order.append(number)

        burst = []
        for number in range(8):
            burst.append(asyncio.create_task(create(number)))
            await asyncio.sleep(0.01)
        cores = len(os.sched_getaffinity(0))
        starting = [line for line in (await server.call.get("instances")).body if line["memory"] is not None]
        assert len(starting) <= 1 + cores
        began = time.monotonic()
        steps = 0
        while not all(task.done() for task in burst):
            await ask(server, "living")
            steps += 1
        assert steps > 8, f"{steps} steps in {time.monotonic() - began:.1f} s"
        position = {number: place for place, number in enumerate(order)}
        assert all(abs(position[number] - number) < cores for number in range(8))
