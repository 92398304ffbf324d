"""Sessions that branch and go back, on a real server: what they know, and that they leave nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Server, served

from aioenv.client import EnvClient
from aioenv.client.retry import Failure
from aioenv.client.session import Session
from aioenv.errors import CallFailed


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    limits = {"max_instances": 8, "queue_timeout": 0.3}
    async with served("echo", "odd", scratch=tmp_path / "scratch", limits=limits) as server:
        yield server
        async with asyncio.timeout(20):
            while (await server.call.get("instances")).body:
                await asyncio.sleep(0.02)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[EnvClient]:
    async with EnvClient(server.call.url, min_backoff=0.0, max_backoff=0.1) as client:
        yield client


async def living(server: Server) -> set[str]:
    return {line["instance_id"] for line in (await server.call.get("instances")).body}


def said(session: Session) -> list[Any]:
    return [step.action.content for step in session.trajectory.steps]


def known(session: Session) -> dict[str, Any]:
    return {"state": session.state, "reward": session.reward, "done": session.done, "error": session.error}


# -- branches ----------------------------------------------------------------------------------------------------------


async def test_branches_go_on_from_where_the_session_is(server: Server, client: EnvClient) -> None:
    async with client.session("echo", "t") as session:
        await session.step("one")
        one, two = await session.branch(2)
        async with one as same, two:
            assert same is one
            assert len({session.instance_id, one.instance_id, two.instance_id}) == 3
            assert await living(server) == {session.instance_id, one.instance_id, two.instance_id}
            for branch in (one, two):
                assert (branch.task_id, branch.env_type, known(branch)) == ("t", "echo", known(session))
                assert branch.trajectory.instance_id == branch.instance_id
                assert branch.trajectory.info["instance_id"] == branch.instance_id
                assert (branch.trajectory.state, said(branch)) == (session.trajectory.state, ["one"])
            assert (await one.step("done"))["info"]["step"] == 2
            assert (one.done, one.reward, await one.evaluate()) == (True, 1.0, 1.0)
            assert (session.done, two.done) == (False, False)
            await two.step("two")
            assert (said(session), said(one), said(two)) == (["one"], ["one", "done"], ["one", "two"])
            assert (await session.evaluate(), await two.evaluate()) == (0.0, 0.0)
            assert one.trajectory.reward.value == 1.0
            assert session.trajectory.reward.value == 0.0
        assert await living(server) == {session.instance_id}
    assert session.trajectory.instance_id == session.instance_id


async def test_nothing_in_a_branch_s_trajectory_is_shared(client: EnvClient) -> None:
    async with client.session("echo", "t") as session:
        await session.step("one")
        async with session.branches(2) as (one, _):
            one.trajectory.steps[0].info["value"] = 0.5
            one.trajectory.info["note"] = "mine"
            one.trajectory.reward.info["why"] = "mine"
            one.state[0]["content"] = "mine"
        for other in (session, _):
            assert "value" not in other.trajectory.steps[0].info
            assert "note" not in other.trajectory.info
            assert other.trajectory.reward.info == {}
            assert other.state[0]["content"] == "one"


async def test_branches_of_branches_outlive_their_source(server: Server, client: EnvClient) -> None:
    async with client.session("echo", "t") as session:
        await session.step("one")
        (child,) = await session.branch()
    async with child:
        await child.step("two")
        async with child.branches(2) as grandchildren:
            for branch in grandchildren:
                await branch.step("three")
                assert said(branch) == ["one", "two", "three"]
        assert await living(server) == {child.instance_id}
    assert await living(server) == set()


async def test_branches_of_an_episode_that_is_over_are_over(client: EnvClient) -> None:
    async with client.session("echo", "t") as session:
        await session.step("done")
        async with session.branches() as (branch,):
            assert (branch.done, branch.reward, branch.error) == (True, 1.0, None)
            assert await branch.evaluate() == 1.0


@pytest.mark.parametrize("n", [20, 65])
async def test_branches_that_can_not_be_made_are_done_and_the_session_goes_on(
    server: Server, client: EnvClient, n: int
) -> None:
    async with client.session("echo", "t") as session:
        async with session.branches(n) as branches:
            assert len(branches) == n
            for branch in branches:
                assert branch.done is True
                assert branch.error is not None
                assert branch.error["code"] == ("at_capacity" if n == 20 else "bad_request")
                assert branch.trajectory.info["error"] == branch.error
                assert (await branch.step("x"))["info"]["fallback"] is True
            assert await living(server) == {session.instance_id}
        await session.step("goes on")
        assert session.error is None
        with pytest.raises(ValueError, match="at least 1"):
            await session.branch(0)


async def test_a_client_that_raises_does_so_in_branching_too(server: Server) -> None:
    async with EnvClient(server.call.url, on_error="raise") as client, client.session("odd", "t") as session:
        with pytest.raises(CallFailed, match="can't be forked"):
            await session.branch(2)
        with pytest.raises(CallFailed, match="can't be forked"):
            await session.checkpoint()
        await session.step("history")


@pytest.mark.parametrize("when", ["at once", "in the queue", "while copies are made"])
async def test_a_cancelled_branching_leaves_nothing(
    server: Server, client: EnvClient, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    forks = asyncio.Event()
    fork = server.pool.branches.fork

    async def told(*args: Any) -> Any:
        forks.set()
        return await fork(*args)

    monkeypatch.setattr(server.pool.branches, "fork", told)
    async with client.session("echo", "t") as session:
        async with server.pool._instances[session.instance_id].turn:
            branching = asyncio.create_task(session.branch(4))
            if when == "at once":
                await asyncio.sleep(0)
            else:
                await forks.wait()
            if when == "in the queue":
                branching.cancel()
                await asyncio.sleep(0.05)
        if when == "while copies are made":
            async with asyncio.timeout(20):
                while not any(one.process for one in server.pool.living() if one.branch_of):
                    await asyncio.sleep(0)
        branching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await branching
        await session.step("goes on")
        async with asyncio.timeout(20):
            while await living(server) != {session.instance_id}:
                await asyncio.sleep(0.02)


async def test_branches_whose_reply_was_lost_are_released(
    server: Server, client: EnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they exist is not known: they are released on the way out."""
    post = client._transport.post

    async def lose(route: str, body: bytes, **options: Any) -> Any:
        outcome = await post(route, body, **options)
        return Failure("reply_lost", "", retryable=True) if route == "/fork" else outcome

    monkeypatch.setattr(client._transport, "post", lose)
    async with client.session("echo", "t") as session:
        async with session.branches(3) as branches:
            assert {branch.error and branch.error["code"] for branch in branches} == {"reply_lost"}
            assert len(await living(server)) == 4  # made once, though asked for three times
        assert await living(server) == {session.instance_id}


# -- checkpoints -------------------------------------------------------------------------------------------------------


async def test_a_session_goes_back_with_all_that_it_knows(server: Server, client: EnvClient) -> None:
    async with client.session("echo", "t") as session:
        await session.step("one")
        start = await session.checkpoint()
        then = known(session)
        for wrong in ("wrong", "done"):
            await session.step(wrong)
            await session.evaluate()
            assert said(session) == ["one", wrong]
            await session.restore(start)
            assert (known(session), said(session), session.trajectory.reward.value) == (then, ["one"], 0.0)
            assert session.trajectory.is_terminated is False
        assert (await session.step("two"))["info"]["step"] == 2
        later = await session.checkpoint()
        await session.restore(start)
        await session.restore(later)
        assert said(session) == ["one", "two"]
        assert (await session.step("three"))["info"]["step"] == 3
        assert len((await server.call.get("checkpoints")).body) == 2
    assert said(session) == ["one", "two", "three"]


async def test_a_session_comes_back_from_its_end_if_its_checkpoint_was_kept(server: Server, client: EnvClient) -> None:
    async with client.session("echo", "t") as session:
        await session.step("one")
        kept = await session.checkpoint(keep=True, ttl=60)
        await server.call.post("release", instance_id=session.instance_id)
        await session.step("two")
        assert session.error is not None
        assert session.error["code"] == "instance_gone"
        await session.restore(kept)
        assert (session.error, session.done, "error" in session.trajectory.info) == (None, False, False)
        assert (await session.step("two"))["info"]["step"] == 2
        assert said(session) == ["one", "two"]


async def test_a_checkpoint_that_can_not_be_made_or_found_ends_the_episode(server: Server, client: EnvClient) -> None:
    async with client.session("odd", "t") as session:
        assert await session.checkpoint() == ""
        assert session.done is True
        assert session.error is not None
        assert session.error["code"] == "bad_request"
    async with client.session("echo", "t") as session:
        checkpoint = await session.checkpoint(ttl=0.01)
        calls = client.stats.calls
        async with session.branches() as (branch,):
            await branch.restore(checkpoint)
            assert branch.error is not None
            assert "this session has no checkpoint" in branch.error["message"]
            assert client.stats.calls == calls + 1
        server.pool.branches.drop_old(float("inf"))
        await session.restore(checkpoint)
        assert session.error is not None
        assert "has no checkpoint" in session.error["message"]
