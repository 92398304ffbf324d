"""Branches of live worlds: equal to their source when they begin, and nobody's but their own from then on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Server, served

from aioenv.pool.instance import Instance


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[Server]:
    async with served("group", scratch=tmp_path / "scratch", limits={"max_instances": 40}) as server:
        await server.call.create("source")
        yield server


async def ask(server: Server, instance_id: str, content: str = "tell") -> dict[str, Any]:
    told = (await server.call.say(instance_id, content)).data["state"][0]["content"]
    assert isinstance(told, dict)
    return told


async def fork(server: Server, source: str, *ids: str, **more: Any) -> list[dict[str, Any]]:
    reply = await server.call.post("fork", instance_id=source, params={"instance_ids": list(ids)}, **more)
    data: list[dict[str, Any]] = reply.data
    return data


async def living(server: Server) -> set[str]:
    return {line["instance_id"] for line in (await server.call.get("instances")).body}


# -- fork --------------------------------------------------------------------------------------------------------------


async def test_copies_are_equal_and_go_their_own_ways(group: Server) -> None:
    await ask(group, "source", "write")
    data = await fork(group, "source", "a", "b")
    assert data == [{"instance_id": name, "task_id": "t", "step": 1} for name in ("a", "b")]
    told = {name: await ask(group, name, "read") for name in ("a", "b", "source")}
    assert len({one["pid"] for one in told.values()}) == 3
    for name, one in told.items():
        assert one["id"] == name
        assert one["notes"] == ["write", "source", "read"]  # the files are copied, too
        assert one["cwd"] == str(group.pool.scratch / "worlds" / name)
    await ask(group, "a", "write")
    assert (await ask(group, "source", "read"))["notes"][-2:] == ["source", "read"]
    assert (await group.call.say("a", "tell")).data["info"]["step"] == 4


async def test_the_source_goes_on_and_its_calls_wait(group: Server) -> None:
    step = asyncio.create_task(group.call.say("source", "sleep"))
    await asyncio.sleep(0.1)
    forked = asyncio.create_task(fork(group, "source", "a"))
    await asyncio.sleep(0.1)
    later = asyncio.create_task(ask(group, "source", "later"))
    assert (await step).status == 200
    assert (await forked)[0]["step"] == 1
    assert (await later)["notes"] == ["sleep", "later"]
    assert (await ask(group, "a"))["notes"] == ["sleep", "tell"]


async def test_branches_of_branches_ten_deep(group: Server) -> None:
    for depth in range(10):
        name = "source" if depth == 0 else f"b{depth - 1}"
        await ask(group, name, f"at {depth}")
        await fork(group, name, f"b{depth}")
    assert (await ask(group, "b9"))["notes"] == [*(f"at {depth}" for depth in range(10)), "tell"]


async def test_32_at_once_while_others_step(group: Server) -> None:
    await group.call.create("other")
    forked = asyncio.create_task(fork(group, "source", *(f"b{number}" for number in range(32))))
    steps = 0
    while not forked.done():
        await ask(group, "other")
        steps += 1
    assert len(await forked) == 32
    assert steps > 10
    told = await asyncio.gather(*(ask(group, f"b{number}") for number in range(32)))
    assert len({one["pid"] for one in told}) == 32


@pytest.mark.parametrize("how", ["release", "kill"])
async def test_source_and_branch_survive_each_other(group: Server, how: str) -> None:
    async def end(name: str) -> None:
        if how == "release":
            await group.call.post("release", instance_id=name)
            return
        os.kill((await ask(group, name))["pid"], signal.SIGKILL)
        async with asyncio.timeout(10):
            while name in await living(group):
                await asyncio.sleep(0.02)

    await fork(group, "source", "a", "b")
    await end("a")
    await ask(group, "source", "lives")
    await end("source")
    assert (await ask(group, "b"))["notes"] == ["tell"]
    assert await living(group) == {"b"}
    # Its death is noticed and told as any other's.
    reply = await group.call.say("b", "exit")
    assert reply.error["message"].startswith("instance b is gone: its process exited with code 3")


async def test_a_fork_asked_again_makes_no_more(group: Server) -> None:
    body = {"instance_id": "source", "params": {"n": 3}, "request_id": "x"}
    first, second = await asyncio.gather(*(group.call.post("fork", **body) for _ in range(2)))
    third = await group.call.post("fork", **body)
    assert first.data == second.data == third.data
    assert len({one["instance_id"] for one in first.data}) == 3
    assert len(await living(group)) == 4


async def test_all_or_none(group: Server) -> None:
    await fork(group, "source", "a")
    for params, status, code, text in [
        ({"instance_ids": ["b", "a"]}, 409, "instance_conflict", "instance a exists already"),
        ({"n": 0}, 400, "bad_request", "from 1 to 64"),
        ({"n": "2"}, 400, "bad_request", '"params.n" must be a number'),
        ({"n": True}, 400, "bad_request", '"params.n" must be a number'),
        ({"instance_ids": ["b", "b"]}, 400, "bad_request", "different instance ids"),
        ({"instance_ids": ["../b"]}, 400, "bad_request", "different instance ids"),
        ({"instance_ids": ["b"], "n": 2}, 400, "bad_request", "as many ids"),
    ]:
        reply = await group.call.post("fork", instance_id="source", params=params)
        assert (reply.status, reply.error["code"]) == (status, code)
        assert text in reply.error["message"]
    assert await living(group) == {"source", "a"}
    reply = await group.call.post("fork", instance_id="nobody")
    assert (reply.status, reply.error["code"]) == (404, "unknown_instance")


async def test_copies_count_in_the_limit(tmp_path: Path) -> None:
    limits = {"max_instances": 3, "queue_timeout": 0.2}
    async with served("group", scratch=tmp_path, limits=limits) as server:
        await server.call.create("source")
        reply = await server.call.post("fork", instance_id="source", params={"n": 3})
        assert (reply.status, reply.error["code"]) == (503, "at_capacity")
        assert await living(server) == {"source"}
        assert len(await fork(server, "source", "a", "b")) == 2
        assert (await server.call.get("readyz")).body["instances"] == 3


async def test_an_env_that_fails_at_it_is_told_and_leaves_nothing(group: Server) -> None:
    for note, text in (("refuses", "raised in before_fork"), ("breaks", "raised in a copy")):
        await ask(group, "source", note)
        reply = await group.call.post("fork", instance_id="source", params={"n": 2})
        assert (reply.status, reply.error["code"]) == (500, "env_error")
        assert text in reply.error["message"]
        assert await living(group) == {"source"}
        assert os.listdir(group.pool.scratch / "worlds") == ["source"]
    assert (await ask(group, "source"))["notes"] == ["refuses", "breaks", "tell"]


async def test_a_copy_that_dies_as_it_wakes_is_not_taken_for_the_source(group: Server) -> None:
    await ask(group, "source", "dies")
    reply = await group.call.post("fork", instance_id="source", params={"instance_ids": ["a", "b"]})
    assert (reply.status, reply.error["code"], reply.error["instance_gone"]) == (500, "env_error", False)
    assert "a copy of instance source died before it was there: instance " in reply.error["message"]
    assert "exited with code 4" in reply.error["message"]
    assert await living(group) == {"source"}
    assert (await ask(group, "source"))["notes"] == ["dies", "tell"]


async def test_a_copy_killed_while_the_others_wake_takes_them_with_it(
    group: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake = Instance.wake

    async def wake_and_die(branch: Instance, steps: int) -> None:
        await wake(branch, steps)
        if branch.id == "a":
            assert branch.process is not None
            os.kill(branch.process.pid, signal.SIGKILL)
        else:
            other = group.pool._instances.get("a")
            if other is not None:
                await other.gone.wait()

    monkeypatch.setattr(Instance, "wake", wake_and_die)
    reply = await group.call.post("fork", instance_id="source", params={"instance_ids": ["a", "b"]})
    assert (reply.status, reply.error["code"]) == (500, "env_error")
    assert "killed by SIGKILL" in reply.error["message"]
    assert await living(group) == {"source"}
    monkeypatch.undo()
    assert len(await fork(group, "source", "a", "b")) == 2


@pytest.mark.parametrize("route", ["fork", "checkpoint"])
async def test_what_was_turned_away_may_be_asked_again(tmp_path: Path, route: str) -> None:
    async with served("group", scratch=tmp_path, limits={"max_instances": 2, "queue_timeout": 0.1}) as server:
        await server.call.create("source")
        await server.call.create("other")
        body = {"instance_id": "source", "request_id": "x"}
        assert (await server.call.post(route, **body)).error["code"] == "at_capacity"
        await server.call.post("release", instance_id="other")
        first = (await server.call.post(route, **body)).data
        assert first == (await server.call.post(route, **body)).data


async def test_an_env_that_has_not_opted_in_says_so(tmp_path: Path) -> None:
    async with served("odd", scratch=tmp_path) as server:
        await server.call.create("mine")
        for route in ("fork", "checkpoint"):
            reply = await server.call.post(route, instance_id="mine")
            assert (reply.status, reply.error["code"]) == (400, "bad_request")
            assert "instances of env odd can't be forked" in reply.error["message"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


async def checkpoint(server: Server, name: str, **params: Any) -> str:
    return str((await server.call.post("checkpoint", instance_id=name, params=params)).data["checkpoint"])


async def restore(server: Server, name: str, checkpoint: str | None = None) -> dict[str, Any]:
    data: dict[str, Any] = (await server.call.post("restore", instance_id=name, params={"checkpoint": checkpoint})).data
    return data


async def test_an_instance_goes_back_as_often_as_one_likes(group: Server) -> None:
    await ask(group, "source", "write")
    early = await checkpoint(group, "source")
    await ask(group, "source", "more")
    late = await checkpoint(group, "source")
    assert [one["checkpoint"] for one in (await group.call.get("checkpoints")).body] == [early, late]
    for _ in range(3):
        await ask(group, "source", "wrong way")
        assert await restore(group, "source", early) == {"instance_id": "source", "checkpoint": early, "step": 1}
        assert (await ask(group, "source", "read"))["notes"] == ["write", "source", "read"]
    reply = await group.call.say("source", "tell")
    assert reply.data["info"]["step"] == 3
    assert (await restore(group, "source"))["checkpoint"] == late
    assert (await ask(group, "source"))["notes"] == ["write", "more", "tell"]
    assert len(os.listdir(group.pool.scratch / "worlds")) == 1


async def test_checkpoints_go_with_their_instance_unless_kept(group: Server) -> None:
    await ask(group, "source", "first")
    await checkpoint(group, "source")
    kept = await checkpoint(group, "source", keep=True)
    await group.call.post("release", instance_id="source")
    async with asyncio.timeout(10):
        while len((await group.call.get("checkpoints")).body) != 1 or group.pool._slots.taken != 1:
            await asyncio.sleep(0.02)
    assert (await group.call.say("source", "tell")).status == 410
    body = {"instance_id": "source", "params": {"checkpoint": kept}, "request_id": "x"}
    first, second = await asyncio.gather(*(group.call.post("restore", **body) for _ in range(2)))
    assert first.data == second.data
    assert first.data["step"] == 1
    told = await ask(group, "source")
    assert (told["id"], told["notes"]) == ("source", ["first", "tell"])
    # A late duplicate does not undo what came after.
    assert (await group.call.post("restore", **body)).data == first.data
    assert (await ask(group, "source"))["notes"] == ["first", "tell", "tell"]


async def test_checkpoints_have_a_time_to_live(tmp_path: Path) -> None:
    async with served("group", scratch=tmp_path, reap_interval=0.1) as server:
        await server.call.create("source")
        await checkpoint(server, "source", ttl=0.3)
        async with asyncio.timeout(10):
            while (await server.call.get("checkpoints")).body or list((server.pool.scratch / "checkpoints").iterdir()):
                await asyncio.sleep(0.02)
        reply = await server.call.post("restore", instance_id="source")
        assert (reply.status, "has no checkpoint; it has: none" in reply.error["message"]) == (400, True)


async def test_a_checkpoint_whose_process_died_is_forgotten_and_the_instance_is_as_it_was(group: Server) -> None:
    await ask(group, "source", "first")
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    name = await checkpoint(group, "source")
    (pid,) = {process.pid for process in psutil.Process().children(recursive=True)} - before
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while (await group.call.get("checkpoints")).body:
            await asyncio.sleep(0.02)
    reply = await group.call.post("restore", instance_id="source", params={"checkpoint": name})
    assert reply.status == 400
    assert (await ask(group, "source"))["notes"] == ["first", "tell"]


@pytest.mark.parametrize(
    "params", [{"keep": "yes"}, {"ttl": 0}, {"ttl": "5"}, {"keep": 1}], ids=["keep", "zero", "text", "number"]
)
async def test_wrong_parameters_are_told(group: Server, params: dict[str, Any]) -> None:
    reply = await group.call.post("checkpoint", instance_id="source", params=params)
    assert (reply.status, reply.error["code"]) == (400, "bad_request")
    assert (await group.call.post("restore", instance_id="source", params={"checkpoint": 5})).status == 400


async def test_a_restored_world_that_dies_is_told_with_its_own_cause(group: Server) -> None:
    await checkpoint(group, "source")
    await restore(group, "source")
    reply = await group.call.say("source", "exit")
    assert reply.error["message"].startswith("instance source is gone: its process exited with code 3")
