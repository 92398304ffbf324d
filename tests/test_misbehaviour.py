"""Worlds that misbehave on purpose (envs/bad/bad_env.py): each caller gets the right answer, and nobody else notices.

The rows say what the answer to an action is. What follows from it is the same for all: after 200 and 500 the same world
answers its next step, after 410 and 504 every later call is told the same cause; a bystander on the same server has
exactly the history that it made; and in the end no process, file descriptor or folder is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
from conftest import Reply, Server, caller, served

# Two servers for the whole module, as a start takes longer than most of the tests: so all run in one loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")

# Seconds, for those that hang. Their bystander must answer within it too, on a machine that is busy with hanging.
LIMIT = 1.5
PASSED = f"step passed its {LIMIT:g} s limit"

DIED, RAISED = (410, "instance_gone"), (500, "env_error")
NO_ANSWER = "its process wrote what is no answer to its pipe"
# Whether the end of its pipe or its exit is noticed first depends on how fast it ends.
ENDED = "its process "
CANT_BE_SENT = "can't be sent as JSON"
# Python 3.12 began to limit recursion in C by itself.
RECURSED_IN_C = (*DIED, "SIGSEGV (11)") if sys.version_info < (3, 12) else (*RAISED, "RecursionError")

# These pass their limit.
HANGING = [
    "loop",
    "sleep",
    "deadlock",
    "sum",
    "power",
    "regex",
    "cling",
    "halt",
    "print_on",
    "swallow",
    "thread hold",
    "leave_main",
    "junk waiting",
    "replace hidden",
    "child stubborn sleep",
]

# The action, what its answer is, and what the message says.
ANSWERED: list[tuple[str, int, str, str]] = [
    # It ends itself.
    ("exit 0", *DIED, "its process exited with code 0"),
    ("exit 3", *DIED, "its process exited with code 3"),
    ("kill 15", *DIED, "its process was killed by SIGTERM (15)"),
    ("kill 9", *DIED, "its process was killed by SIGKILL (9)"),
    ("segfault", *DIED, "its process was killed by SIGSEGV (11)"),
    ("abort", *DIED, "its process was killed by SIGABRT (6)"),
    ("overflow", *DIED, "its process was killed by SIGSEGV (11)"),
    ("recurse_in_c", *RECURSED_IN_C),
    ("exec", *DIED, "its process closed its pipe"),
    ("shout", *DIED, "SIGABRT (6)"),
    ("log gone", *DIED, "SIGABRT (6)"),
    ("log fifo", *DIED, "SIGABRT (6)"),
    ("log folder", *DIED, "SIGABRT (6)"),
    ("log link", *DIED, "SIGABRT (6)"),
    ("log binary", *DIED, "SIGABRT (6)"),
    ("patch all", *DIED, ENDED),
    # Children outlive it, and hold its pipe open.
    ("child same_session exit", *DIED, "its process exited with code 3"),
    ("child own_session exit", *DIED, "its process exited with code 3"),
    ("child double exit", *DIED, "its process exited with code 3"),
    ("child stubborn exit", *DIED, "its process exited with code 3"),
    ("move sleep", *DIED, "its process exited with code 0"),
    # It breaks its pipe.
    ("junk text", *DIED, NO_ANSWER),
    ("junk zeros", *DIED, NO_ANSWER),
    ("junk much", *DIED, NO_ANSWER),
    ("junk no_json", *DIED, NO_ANSWER),
    ("junk no_utf8", *DIED, NO_ANSWER),
    ("junk list", *DIED, NO_ANSWER),
    ("junk empty", *DIED, NO_ANSWER),
    ("junk deep", *DIED, NO_ANSWER),
    ("junk half", *DIED, NO_ANSWER),
    ("junk 4_gib", *DIED, NO_ANSWER),
    ("junk number", *DIED, NO_ANSWER),
    ("junk exit", *DIED, NO_ANSWER),
    ("junk flood", *DIED, NO_ANSWER),
    ("replace output", *DIED, NO_ANSWER),
    ("replace null", *DIED, ENDED),
    ("replace another", *DIED, "its process closed its pipe"),
    ("close pipe", *DIED, ENDED),
    ("close pipe sleep", *DIED, "its process closed its pipe"),
    ("close shutdown", *DIED, ENDED),
    ("close all", *DIED, ENDED),
    ("close all sleep", *DIED, "its process closed its pipe"),
    # It raises.
    ("sys_exit", *RAISED, "SystemExit: 3"),
    ("interrupt", *RAISED, "KeyboardInterrupt"),
    ("recurse", *RAISED, "RecursionError: maximum recursion depth exceeded"),
    ("patch builtins raise", *RAISED, "ValueError: on purpose"),
    ("patch traceback raise", *RAISED, "ValueError"),
    ("setsid", *RAISED, "PermissionError"),  # it leads a session of its own already
    ("setpgid", *RAISED, "PermissionError"),
    ("limit memory", *RAISED, "MemoryError"),
    ("raise exit", *RAISED, "SystemExit: on purpose"),
    ("raise interrupt", *RAISED, "KeyboardInterrupt: on purpose"),
    ("raise generator_exit", *RAISED, "GeneratorExit: on purpose"),
    ("raise cancelled", *RAISED, "CancelledError: on purpose"),
    ("raise stop", *RAISED, "StopIteration: on purpose"),
    ("raise own", *RAISED, "Halt: on purpose"),
    ("raise nothing", *RAISED, "TypeError: exceptions must derive from BaseException"),
    ("raise locked", *RAISED, "Locked: with a lock in it"),
    ("raise mute", *RAISED, "Mute: "),
    ("raise leaving", *RAISED, "Leaving: "),
    ("raise mute_request", *RAISED, "MuteRequest"),
    ("raise closed", *RAISED, "Closed"),
    ("raise nameless", *RAISED, "Nameless"),
    ("raise syntax", *RAISED, "SyntaxError"),
    ("raise group", *RAISED, "TypeError: two"),
    ("raise base_group", *RAISED, "KeyboardInterrupt: three"),
    ("raise deep_group", *RAISED, "ExceptionGroup"),
    ("raise chain", *RAISED, "ValueError: the one after 999"),
    ("raise huge", *RAISED, "RuntimeError: a long story"),
    ("raise too_huge", *RAISED, "RuntimeError: too long a story"),
    ("raise surrogate", *RAISED, "RuntimeError: half ? a pair"),
    ("raise memory", *RAISED, "MemoryError: on purpose"),
    # It returns what is no observation, or can't be one.
    ("return nan_reward", *RAISED, "a finite number"),
    ("return inf_reward", *RAISED, "a finite number"),
    ("return null_reward", *RAISED, "a finite number"),
    ("return text_reward", *RAISED, "a finite number"),
    ("return huge_reward", *RAISED, CANT_BE_SENT),
    ("return yes", *RAISED, "is_terminated"),
    ("return info_list", *RAISED, "info"),
    ("return two", *RAISED, "exactly one message"),
    ("return strings", *RAISED, "step must return"),
    ("return no_state", *RAISED, "step must return"),
    ("return none", *RAISED, "step must return a dict"),
    ("return text", *RAISED, "step must return a dict, not str"),
    ("return tuple", *RAISED, "step must return a dict"),
    ("return coroutine", *RAISED, "coroutine"),
    ("return bytes", *RAISED, "bytes"),
    ("return set", *RAISED, "set"),
    ("return object", *RAISED, "object"),
    ("return generator", *RAISED, "generator"),
    ("return complex", *RAISED, "complex"),
    ("return decimal", *RAISED, "Decimal"),
    ("return floating", *RAISED, "Floating"),
    ("return array", *RAISED, "array"),
    ("return huge_int", *RAISED, "64-bit"),
    ("return huge_negative", *RAISED, "64-bit"),
    ("return int_keys", *RAISED, "key must be str"),
    ("return none_key", *RAISED, "key must be str"),
    ("return endless_list", *RAISED, CANT_BE_SENT),
    ("return endless_dict", *RAISED, CANT_BE_SENT),
    ("return deep", *RAISED, CANT_BE_SENT),
    ("return rather_deep", *RAISED, CANT_BE_SENT),
    ("return trap", *RAISED, CANT_BE_SENT),
    ("return liar", *RAISED, CANT_BE_SENT),
    ("return too_much", *RAISED, "over the limit"),
    # It does what an env should not do, but answers.
    ("child same_session", 200, "", ""),
    ("child own_group", 200, "", ""),
    ("child own_session", 200, "", ""),
    ("child double", 200, "", ""),
    ("child stubborn", 200, "", ""),
    ("child program", 200, "", ""),
    ("child writer", 200, "", ""),
    ("thread spin", 200, "", ""),
    ("thread print", 200, "", ""),
    ("thread stay", 200, "", ""),
    ("thread stay 100", 200, "", ""),
    ("thread raise", 200, "", ""),
    ("print", 200, "", ""),
    ("output none", 200, "", ""),
    ("output closed", 200, "", ""),
    ("deep_folder", 200, "", ""),
    ("delete_folder", 200, "", ""),
    ("chdir", 200, "", ""),
    ("umask", 200, "", ""),
    ("sigchld", 200, "", ""),
    ("signals ignored", 200, "", ""),
    ("signals reset", 200, "", ""),
    ("limit files", 200, "", ""),
    ("limit size", 200, "", ""),
    ("patch builtins", 200, "", ""),
    ("patch modules", 200, "", ""),
]

# Not together: of memory and time they take the most.
LARGE = ("junk much", "raise huge", "raise too_huge", "return too_much")

# Answers that are fine, and why the world is gone soon after.
SPOILT_LATER = [
    ("forge 1", NO_ANSWER),
    ("forge 1000", NO_ANSWER),
    ("both", NO_ANSWER),
    ("move", "its process exited with code 0"),
    ("flood_later", NO_ANSWER),
    ("child flood", NO_ANSWER),
    ("alarm", "its process was killed by SIGALRM (14)"),
    ("late_error", "its process exited with code 1"),
]

# What JSON has an obvious form for, whoever packs it.
CONVERTED: list[tuple[str, Any]] = [
    ("nan", [None, None]),
    ("text_subclass", "text"),
    ("text_subclass_key", {"key": 1}),
    ("float_subclass", 0.5),
    ("int_64", [2**63 - 1, -(2**63), 2**64 - 1]),
    ("tuples", [1, [2]]),
    ("surrogate", {"half ?": "a ? pair"}),
    ("datetime", "2026-01-02T03:04:05+00:00"),
    ("uuid", "00000000-0000-0000-0000-000000000005"),
    ("enum", "red"),
    ("dataclass", {"x": 5}),
]


# -- two servers, and what must not be left of a test ------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _disk_is_not_looked_at() -> Iterator[None]:
    """It is by a process of its own, which would start amid a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aioenv.pool.watch.DISK_INTERVAL", 1000.0)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def patient_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with served("bad", scratch=tmp_path_factory.mktemp("patient")) as server:
        await warm_up(server)
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with served("bad", scratch=tmp_path_factory.mktemp("hasty"), limits={"step_timeout": LIMIT}) as server:
        await warm_up(server)
        yield server


async def warm_up(server: Server) -> None:
    """Have the processes started that a server starts when they are needed for the first time, and then keeps."""
    for _ in range(2):
        await asyncio.gather(*(server.call.post("step", task_id="x" * 2**20) for _ in range(4)))


@pytest_asyncio.fixture(loop_scope="module")
async def patient(patient_server: Server, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Server]:
    async with visited(patient_server, caplog) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def hasty(hasty_server: Server, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Server]:
    async with visited(hasty_server, caplog) as server:
        yield server


@contextlib.asynccontextmanager
async def visited(server: Server, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Server]:
    """The server with a caller of the test's own; afterwards it is as it was, and has found no fault with itself."""
    before = state_of(server)
    async with caller(server.call.url) as call:
        visitor = Server(server.pool, call)
        yield visitor
        for name in await living(visitor):  # where a test failed, the next ones shall not
            await call.post("release", instance_id=name)
    for _ in range(100):  # what was told to end may need a moment
        if not more_than(before, state_of(server)):
            break
        await asyncio.sleep(0.05)
    after = state_of(server)
    # Not shutil's: where the server could not remove a folder, neither could that.
    subprocess.run(["rm", "-rf", *server.pool.scratch.glob("worlds/*")], check=True)  # noqa: ASYNC221
    assert more_than(before, after) == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def state_of(server: Server) -> tuple[list[str], dict[int, int]]:
    """The worlds' folders, and the number of file descriptors of each process: this one's, the root's, …"""
    this = psutil.Process()
    worlds = sorted(os.listdir(server.pool.scratch / "worlds"))
    return worlds, {process.pid: open_files(process.pid) for process in [this, *this.children(recursive=True)]}


def more_than(before: tuple[list[str], dict[int, int]], after: tuple[list[str], dict[int, int]]) -> list[str]:
    """What is there that was not before."""
    folders = [f"folder {name}" for name in after[0] if name not in before[0]]
    files = [f"process {pid} with {number} files" for pid, number in after[1].items() if number > before[1].get(pid, 0)]
    return folders + files


def open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0  # it ended this moment


async def living(server: Server) -> set[str]:
    return {line["instance_id"] for line in (await server.call.get("instances")).body}


async def until_gone(server: Server, name: str) -> None:
    async with asyncio.timeout(20):
        while name in await living(server):
            await asyncio.sleep(0.02)


# -- some misbehave, one does not --------------------------------------------------------------------------------------


def content(reply: Reply) -> Any:
    return reply.data["state"][0]["content"]


def name_for(action: str) -> str:
    return re.sub(r"\W", "-", action)


async def misbehave(server: Server, *actions: str) -> list[Reply]:
    """The answers to the actions, each in a world of its own; in one more an episode goes on as if nothing happened."""
    call = server.call
    await asyncio.gather(*(call.create(name) for name in ["bystander", *map(name_for, actions)]))
    assert content(await call.say("bystander", "hello before")) == "hello before"
    misbehaving = asyncio.gather(*(call.say(name_for(action), action) for action in actions))
    replies, _ = await asyncio.gather(misbehaving, call.say("bystander", "hello meanwhile"))
    assert content(await call.say("bystander", "hello after")) == "hello before, hello meanwhile, hello after"
    assert (await call.post("release", instance_id="bystander")).body["success"] is True
    return replies


async def assert_lives(server: Server, action: str) -> None:
    """The world of `action` goes on from where it was; then it is released."""
    name = name_for(action)
    following = await server.call.say(name, "hello again")
    assert content(following) == f"{action}, hello again"
    assert following.data["info"]["step"] == 2
    assert (await server.call.post("release", instance_id=name)).body["success"] is True
    assert_gone(await server.call.say(name, "hello"), name, "released")


async def assert_dead(server: Server, action: str, cause: str) -> None:
    """Whatever is asked of the world of `action` from now on, the answer is the same."""
    name = name_for(action)
    assert_gone(await server.call.say(name, "hello"), name, cause)
    await until_gone(server, name)
    assert_gone(await server.call.post("evaluate", instance_id=name), name, cause)
    assert (await server.call.post("release", instance_id=name)).body["success"] is False


async def assert_consequence(server: Server, action: str, status: int, text: str) -> None:
    if status == 410:
        await assert_dead(server, action, text)
    else:
        await assert_lives(server, action)


def assert_gone(reply: Reply, name: str, cause: str) -> None:
    assert (reply.status, reply.error["code"], reply.error["instance_gone"]) == (*DIED, True)
    assert reply.error["message"].startswith(f"instance {name} is gone: ")
    assert cause in reply.error["message"]
    assert len(reply.error["message"]) < 2**16, "for a person to read"


async def test_what_hangs_is_ended(hasty: Server) -> None:
    """All at once, as each takes the whole limit."""
    replies = dict(zip(HANGING, await misbehave(hasty, *HANGING), strict=True))
    told = {action: (reply.status, reply.error["code"]) for action, reply in replies.items()}
    assert told == dict.fromkeys(HANGING, (504, "step_timeout"))
    for action, reply in replies.items():
        assert PASSED in reply.error["message"]
        assert reply.error["instance_gone"] is True
        await assert_dead(hasty, action, PASSED)


@pytest.mark.parametrize(("action", "status", "code", "text"), ANSWERED, ids=[row[0] for row in ANSWERED])
async def test_what_misbehaves_is_answered(patient: Server, action: str, status: int, code: str, text: str) -> None:
    (reply,) = await misbehave(patient, action)
    assert reply.status == status, reply.body
    if status != 200:
        assert reply.error["code"] == code
        assert text in reply.error["message"]
    await assert_consequence(patient, action, status, text)


async def test_all_of_it_at_once(patient: Server) -> None:
    together = [row for row in ANSWERED if row[0] not in LARGE]
    replies = await misbehave(patient, *(action for action, *_ in together))
    told = {row[0]: reply.status for row, reply in zip(together, replies, strict=True)}
    assert told == {action: status for action, status, *_ in together}
    await asyncio.gather(*(assert_consequence(patient, action, status, text) for action, status, _, text in together))


@pytest.mark.parametrize(("action", "cause"), SPOILT_LATER)
async def test_what_goes_wrong_after_the_answer_is_told_to_later_calls(
    patient: Server, action: str, cause: str
) -> None:
    (reply,) = await misbehave(patient, action)
    assert reply.status == 200, reply.body
    await until_gone(patient, name_for(action))
    await assert_dead(patient, action, cause)


@pytest.mark.parametrize(("what", "arrives"), CONVERTED)
async def test_what_json_has_a_form_for_arrives_in_it(patient: Server, what: str, arrives: Any) -> None:
    action = f"return {what}"
    (reply,) = await misbehave(patient, action)
    assert content(reply) == arrives
    await assert_lives(patient, action)


async def test_a_forged_answer_that_cannot_be_passed_on_is_the_envs_fault(patient: Server) -> None:
    (reply,) = await misbehave(patient, "forge_deep")
    assert reply.error["code"] in ("env_error", "instance_gone")


@pytest.mark.parametrize("how", ["same_session", "own_group", "own_session", "double", "stubborn", "program"])
async def test_what_a_living_world_started_does_not_end_with_another(patient: Server, how: str) -> None:
    await patient.call.create("living")
    before = set(psutil.Process().children(recursive=True))
    await patient.call.say("living", f"child {how}")
    (started,) = [p for p in psutil.Process().children(recursive=True) if p not in before]
    await misbehave(patient, "exit 3")
    await asyncio.sleep(0.5)  # what a dead world left is looked for a moment later
    assert started.is_running()
    await patient.call.post("release", instance_id="living")
