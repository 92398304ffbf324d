"""A call asked for again, by its request_id, is not run again: the first run's reply comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from conftest import Caller, Reply, Server, served
from hypothesis import given
from hypothesis import strategies as st

from aioenv.errors import EnvError, InstanceConflict
from aioenv.pool.replay import KEPT_BYTES, KEPT_BYTES_AFTER_END, KEPT_REPLIES, Replays
from aioenv.pool.replay import Reply as Kept


@pytest.fixture
async def odd(tmp_path: Path):
    async with served("odd", scratch=tmp_path / "scratch") as server:
        yield server


async def step(call: Caller, content: str, request_id: str, **more: Any) -> Reply:
    body = {"instance_id": "mine", "messages": {"content": content}, "request_id": request_id, **more}
    return await call.post("step", **body)


async def history(call: Caller) -> str:
    return str((await call.say("mine", "history")).data["state"][0]["content"])


async def test_a_duplicate_while_the_call_runs_waits_for_it_and_a_later_one_gets_its_reply(odd: Server) -> None:
    await odd.call.create("mine")
    first, second = await asyncio.gather(*(step(odd.call, "sleep 0.3", "a") for _ in range(2)))
    third = await step(odd.call, "sleep 0.3", "a")
    replies = [first.data, second.data, third.data]
    replayed = [reply["info"].pop("replayed", None) for reply in replies]
    assert sorted(replayed, key=str) == [None, True, True]
    assert replies[0] == replies[1] == replies[2]
    assert await history(odd.call) == "sleep history"


async def test_a_client_that_hung_up_gets_the_reply_later(odd: Server) -> None:
    await odd.call.create("mine")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await step(odd.call, "sleep 0.6", "a")
    again = await step(odd.call, "sleep 0.6", "a")
    assert (again.data["info"]["replayed"], again.data["info"]["step"]) == (True, 1)
    assert await history(odd.call) == "sleep history"


@pytest.mark.parametrize("route", ["evaluate", "get_info"])
async def test_other_calls_are_kept_too(odd: Server, route: str) -> None:
    await odd.call.create("mine")
    body = {"instance_id": "mine", "params": {"score": 0.5}, "request_id": "a"}
    assert (await odd.call.post(route, **body)).data == (await odd.call.post(route, **body)).data


async def test_errors_are_kept_as_well(odd: Server) -> None:
    await odd.call.create("mine")
    first, again = [await step(odd.call, "raise Exception", "a") for _ in range(2)]
    assert (first.status, first.body) == (again.status, again.body)
    assert first.error["code"] == "env_error"
    assert await history(odd.call) == "raise history"


async def test_a_call_that_ended_its_world_is_told_the_same_again() -> None:
    async with served("odd", limits={"step_timeout": 0.3}) as server:
        await server.call.create("mine")
        first = await step(server.call, "block", "a")
        assert (first.status, first.error["code"]) == (504, "step_timeout")
        async with asyncio.timeout(10):
            while (await server.call.get("instances")).body:
                await asyncio.sleep(0.02)
        again = await step(server.call, "block", "a")
        assert (again.status, again.body) == (504, first.body)
        other = await step(server.call, "block", "b")
        assert (other.status, other.error["code"]) == (410, "instance_gone")


async def test_an_id_that_names_another_call_is_refused_and_nothing_runs(odd: Server) -> None:
    await odd.call.create("mine")
    await step(odd.call, "history", "a")
    for again in (await step(odd.call, "pids", "a"), await step(odd.call, "history", "a", params={"x": 1})):
        assert (again.status, again.error["code"]) == (409, "instance_conflict")
        assert "was used for another call" in again.error["message"]
    assert await history(odd.call) == "history history"


async def test_the_same_id_on_another_instance_is_another_call(odd: Server) -> None:
    for name in ("mine", "other"):
        await odd.call.create(name)
        assert "replayed" not in (await step(odd.call, "history", "a", instance_id=name)).data["info"]


async def test_without_ids_each_request_is_a_call(odd: Server) -> None:
    await odd.call.create("mine")
    for number in (1, 2):
        assert (await odd.call.say("mine", "history")).data["info"]["step"] == number


async def test_large_replies_are_kept_too(odd: Server) -> None:
    await odd.call.create("mine")
    first, again = [await step(odd.call, f"big {2**20}", "a") for _ in range(2)]
    assert again.data["info"].pop("replayed") is True
    assert first.data == again.data
    assert len(first.data["state"][0]["content"]) == 2**20


async def test_what_is_long_past_is_refused_and_not_run_again(odd: Server) -> None:
    await odd.call.create("mine")
    for number in range(KEPT_REPLIES + 1):
        await step(odd.call, "history", f"id {number}")
    again = await step(odd.call, "history", "id 0")
    assert (again.status, again.error["code"]) == (409, "instance_conflict")
    assert "not kept any more, and it is not run again" in again.error["message"]
    assert len((await history(odd.call)).split()) == KEPT_REPLIES + 2


@pytest.mark.parametrize("bad", ["", "x" * 201, 5])
async def test_an_id_that_can_not_be_one_is_answered(odd: Server, bad: Any) -> None:
    await odd.call.create("mine")
    reply = await step(odd.call, "history", bad)
    assert (reply.status, reply.error["code"]) == (400, "bad_request")
    assert '"request_id"' in reply.error["message"]


# -- create and release ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", ["mine", None])
async def test_a_create_asked_again_makes_no_second_world(odd: Server, chosen: str | None) -> None:
    body = {"task_id": "t", "instance_id": chosen, "request_id": "a", "params": {"sleep": 0.2}}
    replies = await asyncio.gather(*(odd.call.post("create", **body) for _ in range(3)))
    replies.append(await odd.call.post("create", **body))
    assert len((await odd.call.get("instances")).body) == 1
    assert [reply.data["info"].pop("replayed", False) for reply in replies].count(True) == 3
    assert all(reply.data == replies[0].data for reply in replies)


async def test_a_late_duplicate_of_a_create_does_not_make_the_released_world_anew(odd: Server) -> None:
    body = {"task_id": "t", "instance_id": "mine"}
    await odd.call.post("create", **body, request_id="a")
    await odd.call.post("release", instance_id="mine")
    late = await odd.call.post("create", **body, request_id="a")
    assert (late.status, late.error["message"]) == (410, "instance mine is gone: released")
    assert (await odd.call.get("instances")).body == []
    # Another call may use the id again.
    assert (await odd.call.post("create", **body, request_id="b")).status == 200


async def test_a_release_asked_again_is_told_that_it_released(odd: Server) -> None:
    await odd.call.create("mine")
    calls = [odd.call.post("release", instance_id="mine", request_id=name) for name in ("a", "a", "b")]
    replies = [reply.body["success"] for reply in await asyncio.gather(*calls)]
    replies.append((await odd.call.post("release", instance_id="mine", request_id="a")).body["success"])
    replies.append((await odd.call.post("release", instance_id="mine")).body["success"])
    assert replies in ([True, True, False, True, False], [False, False, True, False, False])


# -- the store ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, KEPT_BYTES)), max_size=60))
async def test_each_call_runs_once_and_gets_its_own_reply_or_is_refused(calls: list[tuple[int, int]]) -> None:
    replays = Replays()
    ran: dict[str, bytes] = {}
    for number, size in calls:
        name = str(number)
        before = replays.find(name)
        if before is None:
            assert name not in ran
            replays.begin(name, number)
            ran[name] = b"x" * size
            replays.finish(name, Kept(ran[name]))
            assert (await replays.find(name).again(name, number)).data == ran[name]  # type: ignore[union-attr]
        else:
            with pytest.raises(InstanceConflict, match="another call"):
                await before.again(name, number + 1)
            if name in replays._kept:
                assert (await before.again(name, number)).data == ran[name]
            else:
                with pytest.raises(InstanceConflict, match="not kept any more"):
                    await before.again(name, number)
    replays.shrink_for_end()
    assert replays._bytes <= KEPT_BYTES_AFTER_END
    assert replays._bytes == sum(call.size for call in replays._kept.values())


async def test_an_error_is_raised_anew_each_time() -> None:
    replays = Replays()
    replays.begin("a", 1)
    replays.finish("a", EnvError("why"))
    call = replays.find("a")
    assert call is not None
    raised = []
    for _ in range(2):
        with pytest.raises(EnvError, match="why") as caught:
            await call.again("a", 1)
        raised.append(caught.value)
    assert raised[0] is not raised[1]
