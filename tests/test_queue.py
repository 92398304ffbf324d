"""Back pressure: creates beyond the limit wait in a bounded line, in order, for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Server, served
from hypothesis import given
from hypothesis import strategies as st

from aioenv.errors import AtCapacity, Draining
from aioenv.pool.slots import Slots


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Server]:
    """Room for two instances, and for two that wait."""
    limits = {"max_instances": 2, "create_queue": 2, "queue_timeout": 30.0}
    async with served("odd", scratch=tmp_path, limits=limits) as server:
        for name in ("a", "b"):
            await server.call.create(name)
        yield server


async def line(server: Server, length: int) -> None:
    async with asyncio.timeout(10):
        while (await server.call.get("readyz")).body["queue"] != length:
            await asyncio.sleep(0.02)


async def test_a_slot_goes_to_the_one_who_has_waited_longest(two: Server) -> None:
    creates = {}
    for length, name in enumerate(("c", "d"), start=1):
        creates[name] = asyncio.create_task(two.call.create(name))
        await line(two, length)
    ready = await two.call.get("readyz")
    assert (ready.status, ready.body["ready"], ready.body["instances"], ready.body["limit"]) == (503, False, 2, 2)
    waiting = {one["instance_id"]: one["queued"] for one in (await two.call.get("instances")).body}
    assert waiting == {"a": False, "b": False, "c": True, "d": True}
    await two.call.post("release", instance_id="a")
    assert await creates["c"] == "c"
    assert not creates["d"].done()
    await two.call.post("release", instance_id="c")
    assert await creates["d"] == "d"


async def test_beyond_the_line_creates_are_refused_at_once(two: Server) -> None:
    creates = [asyncio.create_task(two.call.create(name)) for name in ("c", "d")]
    await line(two, 2)
    refused = await two.call.post("create", task_id="t")
    assert (refused.status, refused.error["code"], refused.error["retryable"]) == (503, "at_capacity", True)
    assert "2 instances live here, which is the limit, and 2 creates wait" in refused.error["message"]
    assert int(refused.headers["Retry-After"]) > 0
    for name in ("a", "b"):
        await two.call.post("release", instance_id=name)
    await asyncio.gather(*creates)


async def test_a_death_makes_room_too(two: Server) -> None:
    create = asyncio.create_task(two.call.create("c"))
    await line(two, 1)
    await two.call.say("a", "exit 1")
    assert await create == "c"


async def test_a_create_that_fails_gives_its_slot_back(two: Server) -> None:
    await two.call.post("release", instance_id="a")
    for _ in range(3):
        assert (await two.call.post("create", task_id="raise")).status == 500
    await two.call.create("c")


async def test_who_waits_too_long_is_refused(tmp_path: Path) -> None:
    async with served("odd", scratch=tmp_path, limits={"max_instances": 1, "queue_timeout": 0.2}) as server:
        await server.call.create("a")
        refused = await server.call.post("create", task_id="t")
        assert (refused.status, refused.error["code"], refused.headers["Retry-After"]) == (503, "at_capacity", "1")
        assert "none ended within 0.2 s" in refused.error["message"]
        assert (await server.call.get("readyz")).body["queue"] == 0
        assert [one["instance_id"] for one in (await server.call.get("instances")).body] == ["a"]


async def test_a_client_that_hangs_up_leaves_the_line(two: Server) -> None:
    create = asyncio.create_task(two.call.create("c"))
    await line(two, 1)
    create.cancel()
    await line(two, 0)
    await two.call.post("release", instance_id="a")
    assert (await two.call.say("c", "history")).error["code"] == "unknown_instance"
    await two.call.create("d")


async def test_a_create_stays_in_line_while_one_of_its_clients_waits(two: Server) -> None:
    gone, stays = (asyncio.create_task(two.call.create("c")) for _ in range(2))
    await line(two, 1)
    await asyncio.sleep(0.1)
    gone.cancel()
    await asyncio.sleep(1)
    await two.call.post("release", instance_id="a")
    assert await stays == "c"


async def test_a_released_id_that_waits_is_not_there_yet(two: Server) -> None:
    create = asyncio.create_task(two.call.create("c"))
    await line(two, 1)
    release = asyncio.create_task(two.call.post("release", instance_id="c"))
    step = asyncio.create_task(two.call.say("c", "history"))
    await two.call.post("release", instance_id="a")
    await create
    # Both came while it waited, and are served in their order once it is there.
    assert (await release).body["success"] is True
    assert (await step).status in (200, 410)


async def test_those_in_line_are_told_when_the_server_stops(two: Server) -> None:
    create = asyncio.create_task(two.call.post("create", task_id="t"))
    await line(two, 1)
    await two.pool.close()
    refused = await create
    assert (refused.status, refused.error["code"]) == (503, "draining")


async def test_time_in_line_is_told_apart_from_time_in_the_world(two: Server) -> None:
    def timing(reply: Any) -> tuple[float, float]:
        queue, world = (part.split(";dur=") for part in reply.headers["Server-Timing"].split(", "))
        assert (queue[0], world[0]) == ("queue", "world")
        return float(queue[1]), float(world[1])

    create = asyncio.create_task(two.call.post("create", task_id="t", params={"sleep": 0.2}))
    await line(two, 1)
    await asyncio.sleep(0.3)
    await two.call.post("release", instance_id="a")
    queued, ran = timing(await create)
    assert queued >= 300
    assert ran >= 200
    first, second = await asyncio.gather(two.call.say("b", "sleep 0.3"), two.call.say("b", "sleep 0.1"))
    assert timing(first)[1] >= 300
    assert timing(second)[0] >= 100
    assert timing(second)[1] >= 100


@given(st.integers(1, 3), st.integers(0, 4), st.lists(st.sampled_from(["take", "give", "cancel"]), max_size=30))
async def test_any_order_of_events_keeps_the_count_and_the_order(limit: int, length: int, events: list[str]) -> None:
    slots = Slots(limit, length, patience=1000)
    asked: list[asyncio.Task[None]] = []
    holders = 0
    got: list[int] = []

    async def take(number: int) -> None:
        await slots.take(lambda: False)
        got.append(number)

    for event in events:
        if event == "take":
            asked.append(asyncio.create_task(take(len(asked))))
        elif event == "give" and len(got) > holders:
            holders += 1
            slots.give_back()
        elif event == "cancel" and asked:
            waiting = [task for task in asked if not task.done()]
            if waiting:
                waiting[0].cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert 0 <= slots.taken <= limit
        assert slots.taken == len(got) - holders
        assert slots.waiting <= length
        assert slots.waiting == 0 or slots.taken == limit
    assert got == sorted(got)
    slots.close(Draining("stopping"))
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        assert outcome is None or isinstance(outcome, AtCapacity | Draining | asyncio.CancelledError)
