"""Births, deaths and ends of worlds: what is noticed, what is told, what is left (nothing)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import orjson
import psutil
import pytest
from conftest import Server, served


@pytest.fixture
async def odd(tmp_path: Path):
    async with served("odd", scratch=tmp_path / "scratch") as server:
        yield server


async def pids_of(server: Server, instance_id: str) -> dict[str, int]:
    content = (await server.call.say(instance_id, "pids")).data["state"][0]["content"]
    return dict(zip(["loaded", "warmed", "world", "parent"], content, strict=True))


async def until_gone(server: Server, *ids: str) -> None:
    async with asyncio.timeout(10):
        while {line["instance_id"] for line in (await server.call.get("instances")).body} & set(ids):
            await asyncio.sleep(0.02)


async def test_worlds_are_forked_from_one_template_that_loaded_the_env_once(odd: Server) -> None:
    one = await pids_of(odd, await odd.call.create())
    two = await pids_of(odd, await odd.call.create())
    template = one["loaded"]
    assert template == one["warmed"] == one["parent"] == two["loaded"] == two["parent"]
    assert len({template, one["world"], two["world"], os.getpid()}) == 4


async def test_a_world_writes_in_its_own_folder_which_goes_with_it(odd: Server) -> None:
    instance_id = await odd.call.create("mine")
    folder = Path((await odd.call.say(instance_id, "print hello there")).data["state"][0]["content"])
    assert folder == odd.pool.scratch / "worlds" / "mine"
    assert (folder / "world.log").read_text() == "hello there\nwritten past Python\n"
    await odd.call.post("release", instance_id=instance_id)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        ("kill 9", "its process was killed by SIGKILL (9)"),
        ("kill 11", "its process was killed by SIGSEGV (11)"),
        ("exit 3", "its process exited with code 3"),
        ("exit 0", "its process exited with code 0"),
    ],
)
async def test_a_waiting_call_is_told_of_the_death_and_later_ones_too(odd: Server, act: str, cause: str) -> None:
    await odd.call.create("mine")
    await odd.call.create("other")
    waiting, queued = await asyncio.gather(odd.call.say("mine", act), odd.call.say("mine", "history"))
    await until_gone(odd, "mine")
    for reply in (waiting, queued, await odd.call.say("mine", "history")):
        assert (reply.status, reply.error["code"]) == (410, "instance_gone")
        assert reply.error["message"].startswith(f"instance mine is gone: {cause}")
    assert (await odd.call.post("release", instance_id="mine")).body["success"] is False
    assert (await odd.call.say("other", "history")).status == 200
    assert not (odd.pool.scratch / "worlds" / "mine").exists()


async def test_a_death_while_idle_is_noticed(odd: Server) -> None:
    await odd.call.create("mine")
    os.kill((await pids_of(odd, "mine"))["world"], signal.SIGKILL)
    await until_gone(odd, "mine")
    assert "SIGKILL" in (await odd.call.say("mine", "history")).error["message"]


@pytest.mark.parametrize("junk", ["", "\x00\x00\x00\x02{}", "\xff\xff\xff\xff"])
async def test_a_world_that_writes_to_its_own_pipe_is_ended(odd: Server, junk: str) -> None:
    await odd.call.create("mine")
    await odd.call.create("other")
    reply = await odd.call.say("mine", f"junk {junk}")
    assert (reply.status, reply.error["code"]) == (410, "instance_gone")
    assert "its process wrote what is no answer" in reply.error["message"]
    assert (await odd.call.say("other", "history")).status == 200


async def test_children_that_a_world_leaves_die_with_it(odd: Server) -> None:
    await odd.call.create("mine")
    daemon = (await odd.call.say("mine", "daemon")).data["state"][0]["content"]
    assert psutil.pid_exists(daemon)
    await odd.call.post("release", instance_id="mine")
    async with asyncio.timeout(10):
        while psutil.pid_exists(daemon):
            await asyncio.sleep(0.02)


async def test_children_with_a_session_of_their_own_die_with_their_world_and_only_with_it(odd: Server) -> None:
    await odd.call.create("mine")
    await odd.call.create("other")
    strays = {name: (await odd.call.say(name, "escape")).data["state"][0]["content"] for name in ("mine", "other")}
    await odd.call.post("release", instance_id="mine")
    async with asyncio.timeout(10):
        while psutil.pid_exists(strays["mine"]):
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    assert psutil.pid_exists(strays["other"])
    await odd.call.post("release", instance_id="other")
    async with asyncio.timeout(10):
        while psutil.pid_exists(strays["other"]):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["file", "link", "locked", "gone"])
async def test_an_id_can_be_used_again_whatever_its_world_did_to_its_folder(odd: Server, how: str) -> None:
    for _ in range(2):
        await odd.call.create("mine")
        await odd.call.say("mine", f"spoil {how}")
        assert (await odd.call.post("release", instance_id="mine")).body["success"] is True
    assert not (odd.pool.scratch / "worlds" / "mine").exists()


async def test_a_forged_answer_is_told_at_once(odd: Server) -> None:
    await odd.call.create("mine")
    reply = await odd.call.say("mine", "forge")
    assert (reply.status, reply.error["code"]) == (410, "instance_gone")
    assert "its process wrote what is no answer" in reply.error["message"]


async def test_a_template_that_is_stuck_is_replaced_and_its_creates_are_told(
    odd: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await odd.call.create("old")
    monkeypatch.setattr("aioenv.pool.process.FORK_LIMIT", 0.5)
    template = (await pids_of(odd, "old"))["loaded"]
    os.kill(template, signal.SIGSTOP)
    reply = await odd.call.post("create", task_id="t", instance_id="new")
    assert (reply.status, reply.error["code"]) == (503, "starting")
    monkeypatch.undo()
    async with asyncio.timeout(20):
        while (await odd.call.get("readyz")).status != 200:
            await asyncio.sleep(0.05)
    await odd.call.create("new")
    assert (await odd.call.say("old", "history")).status == 200


async def test_nothing_waits_for_ever_where_no_death_is_reported(odd: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template that would report it is stopped, and a child of the world's holds its pipe open."""
    monkeypatch.setattr("aioenv.pool.process.KILL_GRACE", 0.2)
    await odd.call.create("mine")
    await odd.call.say("mine", "daemon")
    template = (await pids_of(odd, "mine"))["loaded"]
    os.kill(template, signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            assert (await odd.call.post("release", instance_id="mine")).body["success"] is True
    finally:
        os.kill(template, signal.SIGCONT)


async def test_a_root_process_that_was_killed_is_replaced(odd: Server) -> None:
    await odd.call.create("old")
    template = (await pids_of(odd, "old"))["loaded"]
    root = psutil.Process(template).ppid()
    os.kill(root, signal.SIGKILL)
    async with asyncio.timeout(20):
        while odd.pool.nursery.root().pid == root:
            await asyncio.sleep(0.02)
    os.kill(template, signal.SIGKILL)
    async with asyncio.timeout(20):
        while (await odd.call.post("create", task_id="t", instance_id="new")).status != 200:
            await asyncio.sleep(0.05)
    assert (await odd.call.say("old", "history")).status == 200


async def test_a_template_is_loaded_again_without_being_asked(odd: Server) -> None:
    await odd.call.create("mine")
    os.kill((await pids_of(odd, "mine"))["loaded"], signal.SIGKILL)
    async with asyncio.timeout(20):
        while (await odd.call.get("readyz")).status == 200:
            await asyncio.sleep(0.01)
        while (await odd.call.get("readyz")).status != 200:
            await asyncio.sleep(0.05)
    await odd.call.create("new")


async def test_leftovers_of_dead_servers_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    from aioenv.pool.scratch import Scratch

    living, dead = Scratch(tmp_path), Scratch(tmp_path)
    dead._lock.close()  # as when its process ends
    (dead.path / "worlds" / "w").mkdir()
    (tmp_path / "aioenv-of-somebody").mkdir()
    async with served("echo", scratch=tmp_path):
        assert living.path.exists()
        assert not dead.path.exists()
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, "aioenv-of-somebody"}
    living.close()


async def test_idle_instances_go_and_busy_ones_stay() -> None:
    async with served("odd", idle_ttl=0.5, reap_interval=0.1) as server:
        await server.call.create("idle")
        await server.call.create("busy")
        busy = asyncio.create_task(server.call.say("busy", "sleep 2"))
        queued = asyncio.create_task(server.call.say("busy", "history"))
        await until_gone(server, "idle")
        assert (await busy).data["state"][0]["content"] == "slept"
        assert (await queued).status == 200
        reply = await server.call.say("idle", "history")
        assert (reply.status, reply.error["message"]) == (410, "instance idle is gone: idle for 1 s")
        await until_gone(server, "busy")


async def test_one_bad_instance_does_not_stop_the_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served("odd", idle_ttl=0.3, reap_interval=0.1) as server:
        for name in ("broken", "dead", "fine"):
            await server.call.create(name)

        def fail(now: float) -> float:
            raise RuntimeError("on purpose")

        monkeypatch.setattr(server.pool._instances["broken"], "idle_for", fail)
        dead = server.pool._instances["dead"].process
        assert dead is not None
        os.kill(dead.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while set(server.pool._instances) != {"broken"}:  # GET /instances would ask the broken one
                await asyncio.sleep(0.02)
        monkeypatch.undo()
        await until_gone(server, "broken")


async def test_a_call_that_was_accepted_is_never_reaped(odd: Server) -> None:
    """The reaper decides and marks in one go: a call comes either before, and is served, or after, and is told."""
    await odd.call.create("mine")
    step = asyncio.create_task(odd.pool.call("step", "mine", {"content": "history"}, {}))
    await asyncio.sleep(0)
    assert odd.pool.reap(time.monotonic() + 10**6) == []
    assert orjson.loads((await step).data)["info"]["step"] == 1
    assert odd.pool.reap(time.monotonic() + 10**6) == ["mine"]
    await until_gone(odd, "mine")


async def test_a_template_that_died_is_loaded_again_and_its_worlds_live_on(odd: Server) -> None:
    await odd.call.create("old")
    template = (await pids_of(odd, "old"))["loaded"]
    os.kill(template, signal.SIGKILL)
    async with asyncio.timeout(20):
        while (reply := await odd.call.post("create", task_id="t", instance_id="new")).status != 200:
            assert (reply.status, reply.error["code"]) == (503, "starting")
            await asyncio.sleep(0.1)
    assert (await pids_of(odd, "new"))["loaded"] != template
    assert (await odd.call.say("old", "history")).status == 200
    # And its death is still noticed, by the root that adopted it.
    os.kill((await pids_of(odd, "old"))["world"], signal.SIGKILL)
    await until_gone(odd, "old")
    assert "SIGKILL" in (await odd.call.say("old", "history")).error["message"]


async def test_outputs_are_kept_when_asked(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    async with served("odd", keep_outputs=kept, idle_ttl=0.5, reap_interval=0.1) as server:
        for name in ("released", "reaped"):
            await server.call.create(name)
            await server.call.say(name, f"write {name}")
        await server.call.post("release", instance_id="released")
        await until_gone(server, "reaped")
        await server.call.create("released")
        await server.call.post("release", instance_id="released")
        await server.call.create("shut_down")
        await server.call.say("shut_down", "write shut_down")
    for name in ("released", "reaped", "shut_down"):
        assert (kept / name / "output.txt").read_text() == name
    assert len(list(kept.iterdir())) == 4


async def test_shutting_down_ends_all_and_running_calls_may_finish(tmp_path: Path) -> None:
    async with served("odd", scratch=tmp_path, stop_grace=30.0) as server:
        for name in ("idle", "busy"):
            await server.call.create(name)
        step = asyncio.create_task(server.call.say("busy", "sleep 0.5"))
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(server.pool.close())
        await asyncio.sleep(0.1)
        refused = await server.call.post("create", task_id="t")
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert (await step).data["state"][0]["content"] == "slept"
        await closing
    assert list(tmp_path.iterdir()) == []


async def test_shutting_down_does_not_wait_for_a_world_that_hangs(tmp_path: Path) -> None:
    async with served("odd", scratch=tmp_path, stop_grace=0.2) as server:
        await server.call.create("mine")
        step = asyncio.create_task(server.call.say("mine", "block"))
        await asyncio.sleep(0.2)
        await server.pool.close()
        assert (await step).error["message"] == "instance mine is gone: the server shut down"


async def test_creates_while_the_env_is_loading_are_told_to_come_back() -> None:
    from aioenv.config import Settings
    from aioenv.errors import Starting
    from aioenv.pool.pool import Pool

    pool = Pool(Settings(envs=("echo",)))
    pool.open()
    with pytest.raises(Starting, match="env echo is being loaded"):
        await pool.create("echo", "t", None, {})
    assert pool.readiness()["ready"] is False
    await pool.close()
