"""What a world may use and how long its calls may take: it ends at its limits, for the reason that is told, alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Reply, Server, served
from hypothesis import given
from hypothesis import strategies as st

from aioenv.config import MIB, Limits, room_for_instances
from aioenv.pool import worldlog
from aioenv.pool.watch import Usage, excess, largest_first


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioenv.pool.watch.LOOK_INTERVAL", 0.05)
    monkeypatch.setattr("aioenv.pool.watch.DISK_INTERVAL", 0.1)


LIMITS = {"memory": 64 * MIB, "disk": 16 * MIB, "processes": 8, "open_files": 64, "max_answer": MIB}


@pytest.fixture
async def odd(tmp_path: Path) -> AsyncIterator[Server]:
    async with served("odd", scratch=tmp_path / "scratch", limits=LIMITS) as server:
        for name in ("mine", "other"):
            await server.call.create(name)
        yield server
        assert (await server.call.say("other", "history")).data["state"][0]["content"] == "history"


async def until_gone(server: Server, instance_id: str) -> Reply:
    """What a call gets, once the instance has ended."""
    async with asyncio.timeout(20):
        while (reply := await server.call.post("get_info", instance_id=instance_id)).status == 200:
            await asyncio.sleep(0.05)
    return reply


def assert_gone(reply: Reply, cause: str) -> None:
    assert (reply.status, reply.error["code"]) == (410, "instance_gone"), reply.body
    assert reply.error["message"].startswith(f"instance mine is gone: {cause}")


# -- what the server looks after ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        ("eat 100", "over its 64 MiB memory limit"),
        ("eat_in_child 100", "over its 64 MiB memory limit"),
        ("fork 9", "over its limit of 8 processes"),
        ("fill 20", "over its 16 MiB disk limit"),
        ("fill_removed 15", "over its 16 MiB disk limit"),
    ],
)
async def test_a_world_over_a_limit_is_ended_also_while_idle(odd: Server, act: str, cause: str) -> None:
    if act.startswith("fill_removed"):
        await odd.call.say("mine", "fill 10")
    reply = await odd.call.say("mine", act)
    if reply.status == 200:  # it was quicker than the look at it
        reply = await until_gone(odd, "mine")
    assert_gone(reply, cause)
    assert_gone(await odd.call.say("mine", "history"), cause)


async def test_a_world_within_its_limits_lives_on(odd: Server) -> None:
    for act in ("eat 30", "fork 5", "fill 10", "open 20"):
        assert (await odd.call.say("mine", act)).status == 200
    await asyncio.sleep(1)
    assert (await odd.call.say("mine", "history")).status == 200


async def test_memory_that_grows_too_fast_to_be_seen_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioenv.pool.watch.LOOK_INTERVAL", 1000.0)
    async with served("odd", scratch=tmp_path, limits=LIMITS) as server:
        await server.call.create("mine")
        reply = await server.call.say("mine", "eat 200")
        assert (reply.status, reply.error["code"]) == (500, "env_error")
        assert "MemoryError" in reply.error["message"]


async def test_what_the_kernel_limits_is_an_error_for_the_call(odd: Server) -> None:
    for act, error in [("open 100", "Too many open files"), ("file 30", "File too large")]:
        reply = await odd.call.say("mine", act)
        assert (reply.status, reply.error["code"]) == (500, "env_error")
        assert error in reply.error["message"]
    assert (await odd.call.say("mine", "history")).status == 200


async def test_an_answer_over_its_limit_is_an_error_for_the_call(odd: Server) -> None:
    reply = await odd.call.say("mine", f"big {2 * MIB}")
    assert (reply.status, reply.error["code"]) == (500, "env_error")
    assert "over the limit of 1,048,576" in reply.error["message"]
    assert (await odd.call.say("mine", "history")).data["info"]["step"] == 2


async def test_when_all_take_too_much_together_the_largest_goes_and_none_is_made(tmp_path: Path) -> None:
    async with served("odd", scratch=tmp_path, scratch_limit=24 * MIB) as server:
        for name, size in (("small", 4), ("mine", 12), ("middle", 10)):
            await server.call.create(name)
            await server.call.say(name, f"fill {size}")
        reply = await until_gone(server, "mine")
        assert "the largest, with 12 MiB on disk, when the instances' folders take 26 MiB" in reply.error["message"]
        async with asyncio.timeout(20):
            while (await server.call.get("readyz")).status != 200:
                await asyncio.sleep(0.05)
        for name in ("small", "middle"):
            assert (await server.call.say(name, "history")).status == 200
        server.pool.set_full("no room")
        refused = await server.call.post("create", task_id="t")
        assert (refused.status, refused.error["code"], refused.error["message"]) == (503, "at_capacity", "no room")


async def test_a_full_disk_is_an_error_for_the_create_that_met_it(odd: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("aioenv.pool.scratch.Scratch.new_world", full)
    reply = await odd.call.post("create", task_id="t")
    assert (reply.status, reply.error["code"]) == (503, "at_capacity")
    assert "No space left on device" in reply.error["message"]
    monkeypatch.undo()
    assert (await odd.call.post("create", task_id="t")).status == 200


@given(st.dictionaries(st.text(), st.integers(0, 100)), st.integers(0, 300))
def test_as_few_as_possible_go_and_the_rest_fits(sizes: dict[str, int], limit: int) -> None:
    chosen = largest_first(sizes, sum(sizes.values()), limit)
    left = [sizes[name] for name in sizes if name not in chosen]
    assert sum(left) <= limit
    if chosen:
        assert sum(left) + min(sizes[name] for name in chosen) > limit
        assert all(sizes[name] >= size for name in chosen for size in left)


def test_who_is_over_a_limit() -> None:
    limits = Limits(memory=10 * MIB, processes=4)
    assert excess(Usage(4, 0, 10 * MIB), limits) is None
    assert excess(Usage(4, 99 * MIB, None), limits) is None
    assert excess(Usage(5, 0, None), limits) == "over its limit of 4 processes"
    assert excess(Usage(1, 0, 10 * MIB + 1), limits) == "over its 10 MiB memory limit"
    assert excess(Usage(1, 0, 10 * MIB + 1), Limits()) is None


def test_the_default_number_of_instances_comes_from_the_machine() -> None:
    assert 1 <= room_for_instances() <= 256 * len(os.sched_getaffinity(0))
    assert Limits().max_instances == room_for_instances()


# -- time --------------------------------------------------------------------------------------------------------------


async def test_a_step_may_ask_for_less_time_but_not_for_more(tmp_path: Path) -> None:
    async with served("odd", scratch=tmp_path, limits={"step_timeout": 0.5}) as server:
        for name, timeout, told in (("less", 0.2, "step passed its 0.2 s limit"), ("more", 9, "step passed its 0.5 s")):
            await server.call.create(name)
            assert (await server.call.say(name, "history", timeout=timeout)).status == 200
            reply = await server.call.say(name, "block", timeout=timeout)
            assert (reply.status, reply.error["code"]) == (504, "step_timeout")
            assert reply.error["message"].startswith(told)


@pytest.mark.parametrize("timeout", [0, -1, "5", True, [1]])
async def test_a_time_limit_that_is_none_is_answered(odd: Server, timeout: Any) -> None:
    reply = await odd.call.say("mine", "history", timeout=timeout)
    assert (reply.status, reply.error["code"]) == (400, "bad_request")
    assert '"params.timeout" must be a number of seconds over 0' in reply.error["message"]


# -- last words --------------------------------------------------------------------------------------------------------


async def test_a_death_is_told_with_the_last_words_to_all_who_ask(odd: Server) -> None:
    replies = await asyncio.gather(odd.call.say("mine", "cry good bye"), odd.call.say("mine", "history"))
    replies.append(await odd.call.say("mine", "history"))
    for reply in replies:
        assert (reply.status, reply.error["message"]) == (
            410,
            "instance mine is gone: its process was killed by SIGKILL (9); its last output was:\nfirst words\ngood bye",
        )


async def test_a_segfault_tells_where_it_was(odd: Server) -> None:
    reply = await odd.call.say("mine", "segfault")
    assert_gone(reply, "its process was killed by SIGSEGV (11); its last output was:\n")
    assert "in do_segfault" in reply.error["message"]


async def test_a_world_that_was_released_has_no_last_words(odd: Server) -> None:
    await odd.call.say("mine", "print hello")
    await odd.call.post("release", instance_id="mine")
    assert (await odd.call.say("mine", "history")).error["message"] == "instance mine is gone: released"


async def test_a_death_in_creation_is_told_with_its_last_words(tmp_path: Path) -> None:
    async with served("odd", scratch=tmp_path) as server:
        reply = await server.call.post("create", task_id="cry")
        assert reply.error["message"] == (
            "the world died while it was created: its process was killed by SIGKILL (9); its last output was:\n"
            "first words\nin creation"
        )


async def test_a_log_that_grows_is_cut_to_its_end(odd: Server) -> None:
    await odd.call.say("mine", "shout 8")
    log = odd.pool.scratch / "worlds/mine/world.log"
    async with asyncio.timeout(20):
        while log.stat().st_size > worldlog.LOG_LIMIT:
            await asyncio.sleep(0.05)
    await odd.call.say("mine", "print more")
    text = log.read_text()
    assert "cut off" in text
    assert text.endswith("x 7\nmore\nwritten past Python\n")


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "world"
    folder.mkdir()
    return folder


def test_last_words_are_few(log_folder: Path) -> None:
    (log_folder / "world.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    assert worldlog.last_words(log_folder) == "; its last output was:\n" + "\n".join(
        f"line {n}" for n in range(990, 1000)
    )
    (log_folder / "world.log").write_text("x" * 10**6)
    assert len(worldlog.last_words(log_folder)) < 2100
    (log_folder / "world.log").write_bytes(b"\xff\xfe")
    assert worldlog.last_words(log_folder).endswith("\ufffd\ufffd")


@pytest.mark.parametrize("what", ["nothing", "link", "hard link", "fifo", "folder", "linked folder"])
def test_what_is_not_the_log_is_neither_read_nor_cut(log_folder: Path, what: str) -> None:
    secret = log_folder.parent / "secret"
    secret.write_text("s" * (worldlog.LOG_LIMIT + 1))
    log = log_folder / "world.log"
    if what == "link":
        log.symlink_to(secret)
    elif what == "hard link":
        log.hardlink_to(secret)
    elif what == "fifo":
        os.mkfifo(log)
    elif what == "folder":
        log.mkdir()
    elif what == "linked folder":
        log_folder.rmdir()
        target = log_folder.parent / "target"
        target.mkdir()
        secret.rename(target / "world.log")
        secret = target / "world.log"
        log_folder.symlink_to(target)
    assert worldlog.last_words(log_folder) == ""
    assert not worldlog.cut(log_folder)
    assert secret.stat().st_size == worldlog.LOG_LIMIT + 1


# -- history -----------------------------------------------------------------------------------------------------------


async def test_the_history_is_shown(odd: Server) -> None:
    await odd.call.say("mine", "history")
    (line,) = [line for line in (await odd.call.get("instances")).body if line["instance_id"] == "mine"]
    assert [state for _, state in line["history"]] == ["starting", "ready", "busy", "ready"]
    times = [seconds for seconds, _ in line["history"]]
    assert times == sorted(times)


async def test_the_end_is_logged_with_cause_and_history(odd: Server, caplog: pytest.LogCaptureFixture) -> None:
    await odd.call.say("mine", f"kill {signal.SIGTERM.value}")
    await until_gone(odd, "mine")
    async with asyncio.timeout(10):
        while not (lines := [line for line in caplog.messages if line.startswith("instance mine (odd, task t) ended")]):
            await asyncio.sleep(0.02)
    assert "after 0 steps: its process was killed by SIGTERM (15); it was starting at 0.000 s, ready at" in lines[0]


async def test_old_instances_go_when_no_call_runs(tmp_path: Path) -> None:
    async with served("odd", scratch=tmp_path, max_lifetime=1, reap_interval=0.1) as server:
        await server.call.create("mine")
        assert (await server.call.say("mine", "sleep 1.5")).status == 200
        assert_gone(await until_gone(server, "mine"), "alive for 1 s, its maximum lifetime")
