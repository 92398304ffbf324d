"""Sessions and rollouts, on a real server: what they give, and that they leave nothing, however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Server, served

from aioenv.client import EnvClient
from aioenv.errors import CallFailed
from aioenv.schema import ActionMessage, Message


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    limits = {"max_instances": 4, "step_timeout": 5.0}
    async with served("echo", "odd", scratch=tmp_path / "scratch", limits=limits) as server:
        yield server
        async with asyncio.timeout(20):
            while (await server.call.get("instances")).body:
                await asyncio.sleep(0.02)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[EnvClient]:
    async with EnvClient(server.call.url, min_backoff=0.0, max_backoff=0.1) as client:
        yield client


async def living(server: Server) -> list[str]:
    return [line["instance_id"] for line in (await server.call.get("instances")).body]


# -- sessions ----------------------------------------------------------------------------------------------------------


async def test_a_session_plays_an_episode(server: Server, client: EnvClient) -> None:
    async with client.session("echo", "t", params={"a": 1}) as session:
        assert await living(server) == [session.instance_id]
        assert [message["role"] for message in session.state] == ["system", "user"]
        actions: list[Any] = ["hello", {"role": "assistant", "content": "again"}, ActionMessage(content="done")]
        for action in actions:
            assert session.done is False
            await session.step(action)
        assert session.state[0]["content"] == "done"
        assert (session.done, session.reward, session.error) == (True, 1.0, None)
        score = await session.evaluate(sparse=True)
        assert (score, score.fallback) == (1.0, False)
    assert await living(server) == []
    trajectory = session.trajectory
    assert (trajectory.task_id, trajectory.env_type, trajectory.instance_id) == ("t", "echo", session.instance_id)
    assert [step.action.content for step in trajectory.steps] == ["hello", "again", "done"]
    assert (trajectory.is_terminated, trajectory.reward.value) == (True, 1.0)
    assert [message.content for message in session.messages()][-2:] == ["done", "done"]


async def test_a_step_after_the_end_is_not_sent(server: Server, client: EnvClient) -> None:
    async with client.session("echo", "t") as session:
        await session.step("done")
        calls = client.stats.calls
        over = await session.step("more")
        assert (over["info"]["fallback"], over["is_terminated"]) == (True, True)
        assert "The action was not run." in over["state"][0]["content"]
        assert client.stats.calls == calls
        assert len(session.trajectory.steps) == 1


async def test_a_session_that_fails_says_so_and_holds_no_fallback_for_a_step(server: Server, client: EnvClient) -> None:
    async with client.session("odd", "t") as session:
        await session.step("history")
        reply = await session.step("exit 3")
        assert reply["info"]["fallback"] is True
        assert session.done is True
        assert session.error is not None
        assert session.error["code"] == "instance_gone"
        score = await session.evaluate()
        assert score.fallback
    assert len(session.trajectory.steps) == 1
    assert session.trajectory.info["error"] == session.error


async def test_a_session_that_can_not_begin_is_done(server: Server, client: EnvClient) -> None:
    async with client.session("odd", "missing") as session:
        assert session.done is True
        assert session.error is not None
        assert session.error["code"] == "unknown_task"
    assert session.trajectory.task_id == "missing"


async def test_what_is_no_message_ends_the_session_and_raises_nothing(server: Server, client: EnvClient) -> None:
    async with client.session("odd", "t") as session:
        await session.step("pids")  # its content is a list
        assert session.error is not None
        assert session.error["code"] == "bad_reply"


@pytest.mark.parametrize("how", ["return", "raise", "cancel", "cancel in create"])
async def test_a_session_is_released_on_every_way_out(server: Server, client: EnvClient, how: str) -> None:
    begun = asyncio.Event()

    async def play() -> None:
        begun.set()
        async with client.session("odd", "t", params={"sleep": 0.3}):
            assert how != "cancel in create"
            if how == "raise":
                raise ValueError(how)
            if how == "cancel":
                await asyncio.sleep(100)

    task = asyncio.create_task(play())
    await begun.wait()
    if how.startswith("cancel"):
        await asyncio.sleep(0.1 if how == "cancel in create" else 1)
        task.cancel()
    with pytest.raises(BaseException) if how != "return" else pytest.MonkeyPatch.context():
        await task
    async with asyncio.timeout(20):
        while await living(server):
            await asyncio.sleep(0.02)


async def test_a_client_that_raises_does_so_in_a_session_too(server: Server) -> None:
    async with EnvClient(server.call.url, on_error="raise") as client:
        with pytest.raises(CallFailed, match="no such task"):
            async with client.session("odd", "missing"):
                raise AssertionError("not reached")
        with pytest.raises(CallFailed, match="exited with code 3"):
            async with client.session("odd", "t") as session:
                await session.step("exit 3")


async def test_a_session_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioenv.client.session._BUSY_PAUSE", 0.1)
    limits = {"max_instances": 1, "create_queue": 0}
    async with (
        served("echo", scratch=tmp_path, limits=limits) as server,
        EnvClient(server.call.url, tries=1) as client,
    ):
        async with client.session("echo", "t"):
            async with client.session("echo", "u", patience=0) as refused:
                assert refused.error is not None
                assert refused.error["code"] == "at_capacity"
            waiting = asyncio.create_task(client.session("echo", "v").__aenter__())
            await asyncio.sleep(0.3)
            assert not waiting.done()
        async with asyncio.timeout(20):
            session = await waiting
        assert session.error is None
        await session.__aexit__(None, None, None)


async def test_waiting_for_a_server_that_is_full_or_not_there(server: Server, client: EnvClient) -> None:
    for number in range(4):
        await server.call.create(f"i{number}")
    assert (await client.ready(), await client.wait_ready()) == (False, True)
    for number in range(4):
        await server.call.post("release", instance_id=f"i{number}")
    async with EnvClient("http://127.0.0.1:9") as nobody:
        assert await nobody.wait_ready(timeout=1.5) is False


# -- rollouts ----------------------------------------------------------------------------------------------------------


async def test_a_rollout_plays_all_tasks_a_few_at_a_time(server: Server, client: EnvClient) -> None:
    at_once = 0
    most = 0

    async def agent(messages: list[Message]) -> str:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.02)
        at_once -= 1
        return "done" if len(messages) > 4 else "hello"

    tasks = [f"t{number}" for number in range(10)]
    played = [episode async for episode in client.rollout(agent, tasks, env_type="echo", concurrency=3, progress=True)]
    assert sorted(episode.task_id for episode in played) == sorted(tasks)
    for episode in played:
        assert [step.action.content for step in episode.steps] == ["hello", "hello", "done"]
        assert (episode.is_terminated, episode.reward.value, "error" in episode.info) == (True, 1.0, False)
    assert 1 < most <= 3


async def test_one_failing_episode_ends_no_other(server: Server, client: EnvClient) -> None:
    class Task:
        def __init__(self, task_id: str, env_type: str) -> None:
            self.task_id = task_id
            self.env_type = env_type

    async def agent(messages: list[Message]) -> Any:
        task = messages[-1].content
        if "raises" in task:
            raise RuntimeError("the agent failed")
        if "gives up" in task:
            return None
        if "no message" in task:
            return {"role": "nobody"}
        if "sleeps" in task:
            await asyncio.sleep(100)
        return "kill 9" if task == "behave" else "done"

    tasks: list[Any] = ["fine", "raises", "gives up", "no message", "sleeps", Task("t", "odd"), Task("missing", "odd")]
    options = {"env_type": "echo", "episode_timeout": 3.0, "concurrency": 4}
    played = {episode.task_id: episode async for episode in client.rollout(agent, tasks, **options)}
    errors = {name: (episode.info.get("error") or {}).get("code") for name, episode in played.items()}
    assert errors == {
        "fine": None,
        "gives up": None,
        "raises": "agent_error",
        "no message": "agent_error",
        "sleeps": "deadline",
        "t": "instance_gone",
        "missing": "unknown_task",
    }
    assert "the agent failed" in played["raises"].info["error"]["message"]
    assert (played["fine"].reward.value, played["gives up"].reward.value) == (1.0, 0.0)


async def test_an_agent_can_be_made_for_each_task_and_steps_are_limited(server: Server, client: EnvClient) -> None:
    class Counting:
        def __init__(self, task: str) -> None:
            self.task = task
            self.turns = 0

        async def __call__(self, messages: list[Message]) -> str:
            self.turns += 1
            return f"{self.task} {self.turns}"

    options = {"env_type": "echo", "make_agent": True, "max_steps": 2}
    async for episode in client.rollout(Counting, ["a", "b"], **options):  # type: ignore[arg-type]
        assert [step.action.content for step in episode.steps] == [f"{episode.task_id} 1", f"{episode.task_id} 2"]
        assert episode.is_terminated is False


async def test_leaving_early_ends_and_releases_the_rest(server: Server, client: EnvClient) -> None:
    async def agent(messages: list[Message]) -> str:
        if "t0" not in messages[1].content:
            await asyncio.sleep(100)
        return "done"

    episodes = client.rollout(agent, (f"t{number}" for number in range(100)), env_type="echo", concurrency=4)
    async for episode in episodes:
        assert episode.task_id == "t0"
        break
    await episodes.aclose()
    assert await living(server) == []


async def test_wrong_options_are_told_at_once(client: EnvClient) -> None:
    async def agent(messages: list[Message]) -> str:
        return ""

    for options in ({"concurrency": 0}, {"max_steps": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            async for _ in client.rollout(agent, ["t"], **options):
                pass
