"""Everything at once, for a minute: episodes while processes are killed and clients hang up and repeat themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from conftest import ENVS, serve_command

sys.path.append(str(Path(__file__).parent.parent / "bench"))
from chaos import Call, Chaos, Harm, Reply, check_call, check_ledger

SECONDS = float(os.environ.get("AIOENV_CHAOS_SECONDS", "60"))
WORLDS = 16
# How long it plays without harm, before what it uses is counted: until there are as many group templates as are kept.
CALM_SECONDS = 4.0
# More than before: the files of a job process, or of a group template that is being made; and the threads of asyncio's
# own executor, which are started as they are needed.
FILES_SLACK = 24  # two executors, which are started when they are needed
THREADS_SLACK = 6


async def uses(pid: int) -> tuple[int, int]:
    """The server's open files and threads, when those of the clients that just went are closed."""
    await asyncio.sleep(1)
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.timeout(SECONDS + 200)
async def test_whatever_happens_each_action_runs_once_and_each_failure_is_explained(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    options = ("--env", "count", "--env-dir", str(ENVS), "--scratch", str(scratch))
    with serve_command(*options) as (url, server):
        chaos = Chaos(url, server.pid, tmp_path / "ledger", WORLDS)
        await chaos.play(CALM_SECONDS, harm=False)
        files, threads = await uses(server.pid)
        await chaos.play(SECONDS)
        await chaos.play(CALM_SECONDS, harm=False)
        files_after, threads_after = await uses(server.pid)
        processes = chaos.seen | set(psutil.Process(server.pid).children(recursive=True))
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, 60) == 0
    report = chaos.finish()
    assert report.violations == []
    assert all(report.kills[kind] > 0 for kind in ("world", "group", "template", "job")), report
    assert report.dead > 0
    assert report.steps > 300
    assert report.hang_ups > 0
    assert report.replays > 0
    assert files_after <= files + FILES_SLACK
    assert threads_after <= threads + THREADS_SLACK
    _, left = psutil.wait_procs(processes, timeout=5)
    assert left == []
    assert list(scratch.iterdir()) == []


# -- that violations are found -----------------------------------------------------------------------------------------


def reply(status: int = 200, data: object = None, code: str = "", message: str = "", replayed: bool = False) -> Reply:
    """One that was sent at 1.0 and came at 2.0."""
    if status == 200:
        info = {"step": 1, **({"replayed": True} if replayed else {})}
        return Reply(200, {"success": True, "data": {"content": data, "info": info}}, None, 1.0, 2.0)
    error = {"code": code, "message": message, "retryable": status == 503, "instance_gone": status == 410}
    return Reply(status, {"success": False, "detail": message, "error": error}, "5", 1.0, 2.0)


GOOD = reply(data="mine")
REPLAYED = reply(data="mine", replayed=True)
GONE = reply(410, code="instance_gone", message="instance i is gone: its process was killed by SIGKILL (9)")
STARTING = reply(503, code="starting", message="env count is being loaded again")
KILLED = Harm(worlds={"i": 1.5})


@pytest.mark.parametrize(
    ("replies", "requests", "harm", "found"),
    [
        ([GOOD], 1, Harm(), []),
        ([GOOD, REPLAYED], 2, Harm(), []),
        ([REPLAYED], 2, Harm(), []),
        ([GOOD, GONE], 2, KILLED, []),
        ([reply(data="another's")], 1, Harm(), ["expected the data"]),
        ([GOOD, GOOD], 2, Harm(), ["seen 2 without"]),
        ([REPLAYED, REPLAYED], 2, Harm(), ["seen none"]),
        ([GONE], 1, Harm(), ["nobody harmed it"]),
        ([GONE], 1, Harm(worlds={"i": 2.5, "other": 1.5}), ["nobody harmed it"]),
        ([reply(410, code="instance_gone", message="its pipe ended")], 1, KILLED, ["killed by SIGKILL, but told"]),
        ([reply(500, code="internal_error", message="SIGKILL")], 1, KILLED, ["expected a failure of the protocol"]),
        ([Reply(500, "<html>", None, 1.0, 2.0)], 1, KILLED, ["expected a failure of the protocol"]),
        ([Reply(0, "TimeoutError()", None, 1.0, 31.0)], 1, KILLED, ["no reply after 30.0 s"]),
        ([STARTING], 1, KILLED, ["expected success, seen 503"]),
    ],
)
def test_replies_that_break_a_rule_are_found(replies: list[Reply], requests: int, harm: Harm, found: list[str]) -> None:
    call = Call("step", "i", {}, {"content": "mine", "info": {"step": 1}}, requests=requests, replies=replies)
    sentences = list(check_call(call, harm))
    assert len(sentences) == len(found), sentences
    assert all(part in sentence for part, sentence in zip(found, sentences, strict=True))


def test_a_create_may_be_told_to_come_back_only_while_the_template_is_away() -> None:
    call = Call("create", "i", {}, None, began=1.0, requests=1, replies=[STARTING])
    assert list(check_call(call, Harm(reloads=[(0.0, 1.5)]))) == []
    assert len(list(check_call(call, Harm(reloads=[(0.0, 0.5), (2.5, 3.0)])))) == 1


def test_a_create_may_die_with_what_it_is_forked_from() -> None:
    died = reply(500, code="env_error", message="the world died while it was created: killed by SIGKILL (9)")
    call = Call("create", "i", {}, None, began=1.0, requests=1, replies=[died])
    assert list(check_call(call, Harm(parents=[1.5]))) == []
    assert len(list(check_call(call, Harm(parents=[0.5, 2.5])))) == 1


def test_actions_that_were_lost_or_ran_twice_are_found() -> None:
    sent = {"i answered": True, "i twice": False, "i lost": True, "i unknown": False}
    found = list(check_ledger(["i answered", "i twice", "i twice", "j strange"], sent))
    assert [sentence.partition(":")[0] for sentence in found] == ["i twice", "j strange", "i lost"]
