"""Large bodies: they pass, checked as any other, and hold up nobody else."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from conftest import Server, served

from aioenv.pool.wire import LARGE

MIB = 2**20


@pytest.fixture
async def odd(tmp_path: Path) -> AsyncIterator[Server]:
    async with served("odd", scratch=tmp_path / "scratch") as server:
        await server.call.create("mine")
        yield server


@pytest.mark.parametrize("size", [LARGE - 200, LARGE, 30 * MIB])
async def test_a_large_observation_arrives_whole(odd: Server, size: int) -> None:
    reply = await odd.call.say("mine", f"big {size}")
    assert reply.data["state"] == [{"tool_calls": [], "role": "user", "content": "x" * size}]
    assert reply.data["info"] == {"instance_id": "mine", "task_id": "t", "step": 1}


async def test_a_large_action_arrives_whole(odd: Server) -> None:
    text = "ä" * (5 * MIB)
    assert (await odd.call.say("mine", f"measure {text}")).data["state"][0]["content"] == len(text)


async def test_a_large_first_state_arrives_whole(tmp_path: Path) -> None:
    for groups in (0, 16):
        async with served("group", scratch=tmp_path / str(groups), group_templates=groups) as server:
            for name in ("a", "b"):
                reply = await server.call.post("create", task_id="big", instance_id=name)
                assert len(reply.data["state"][0]["content"]) == 2 * MIB
                assert reply.data["info"]["instance_id"] == name


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("two", "must return a state of exactly one message"),
        ("nan", "must return a finite number as its reward"),
        ("raise", "x" * 100),
    ],
)
async def test_a_large_answer_that_is_wrong_is_told_and_the_world_lives_on(
    odd: Server, what: str, message: str
) -> None:
    reply = await odd.call.say("mine", f"large {what}")
    assert (reply.status, reply.error["code"]) == (500, "env_error")
    assert message in reply.error["message"]
    assert (await odd.call.say("mine", "history")).data["info"]["step"] == 2


async def test_a_large_answer_that_is_none_ends_its_world(odd: Server) -> None:
    await odd.call.create("other")
    reply = await odd.call.say("mine", "large junk")
    assert (reply.status, reply.error["code"]) == (410, "instance_gone")
    assert "its process wrote what is no answer to its pipe (a frame is not JSON" in reply.error["message"]
    assert (await odd.call.say("other", "history")).status == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"[" + b"1," * LARGE + b"1]", 400, "must be a JSON object"),
        (b'{"instance_id": "mine", "x": "' + b"x" * LARGE, 400, "the body is not JSON"),
        (orjson.dumps({"instance_id": 5, "x": "x" * LARGE}), 400, '"instance_id" must be a string'),
        (orjson.dumps({"instance_id": "mine", "params": {"x": "x" * LARGE}}), 413, '"params" takes'),
    ],
    ids=["list", "cut off", "wrong type", "large params"],
)
async def test_a_large_request_that_is_wrong_is_told(odd: Server, body: bytes, status: int, message: str) -> None:
    reply = await odd.call.post("step", raw=body)
    assert (reply.status, message in reply.error["message"]) == (status, True), reply.body


async def test_jobs_that_die_under_large_bodies_lose_nothing(odd: Server) -> None:
    async def kill() -> None:
        while True:
            executor = odd.pool.bodies._executor
            for process in list((executor._processes or {}).values()) if executor else []:
                process.kill()
                return
            await asyncio.sleep(0.01)

    reply, _ = await asyncio.gather(odd.call.say("mine", f"big {20 * MIB}"), kill())
    assert reply.status in (200, 500)
    if reply.status == 500:
        assert (reply.error["code"], "died, twice" in reply.error["message"]) == ("internal_error", True)
    assert (await odd.call.say("mine", "history")).status == 200


async def test_others_are_answered_while_large_bodies_pass(odd: Server, request: Any) -> None:
    """What is asserted is that they get their turn often; how fast is measured by bench/large.py."""
    await odd.call.create("other")
    large = [asyncio.create_task(odd.call.say("mine", f"big {10 * MIB}")) for _ in range(3)]
    times = []
    while not all(task.done() for task in large):
        began = time.monotonic()
        assert (await odd.call.say("other", "history")).status == 200
        times.append(time.monotonic() - began)
    assert all(task.result().status == 200 for task in large)
    assert len(times) > 20, statistics.quantiles(times)
