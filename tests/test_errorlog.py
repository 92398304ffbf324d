"""The error log: what it keeps, that it is on disk, and that no trouble with it reaches a call.

No test measures time: what must not hang would run into the time limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Server, served

from aioenv.client import EnvClient, errorlog

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>WARNING|ERROR) \[(?P<pid>\d+)\] (?P<message>.*)")
logger = logging.getLogger("aioenv.client")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process as before its first client."""
    for name in ("AIOENV_CLIENT_LOG", "CLIENT_LOG_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(errorlog, "_writer", errorlog.Writer())
    yield
    logger.removeFilter(errorlog._keep)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "logs" / "rl_log" / "error.out"
    monkeypatch.setenv("AIOENV_CLIENT_LOG", str(path))
    return path


@pytest.fixture
def nobody() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def messages(path: Path) -> list[tuple[str, str]]:
    """Level and message of each line, all of which must be whole."""
    assert errorlog.flush(60)
    return read(path)


def read(path: Path) -> list[tuple[str, str]]:
    text = path.read_text()
    assert text.endswith("\n")
    matches = [LINE.fullmatch(line) for line in text.splitlines()]
    return [(match["level"], match["message"]) for match in matches if match or pytest.fail(text)]


def script(code: str, *args: str, **environ: str) -> subprocess.Popen[str]:
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", f"import sys\nfrom aioenv.client.sync import EnvClient\n{code}", *args]
    return subprocess.Popen(command, text=True, env={**os.environ, **environ}, **piped)  # type: ignore[call-overload,no-any-return]


def run(code: str, *args: str, **environ: str) -> tuple[str, str]:
    """What a script prints on both of its outputs, once it has ended by itself."""
    with script(code, *args, **environ) as process:
        said: tuple[str, str] = process.communicate(timeout=100)
    assert process.returncode == 0, said
    return said


# ---- what it keeps


async def test_failed_calls_and_tries_are_lines_of_the_file(echo: Server, nobody: str, log: Path) -> None:
    async with EnvClient(echo.call.url) as one, EnvClient(nobody, tries=2, min_backoff=0, max_backoff=0) as other:
        created = await one.create_instance("echo", "t")
        await one.step("gone", {"content": "x"})
        await other.evaluate("i1")
        await one.release_instance(created["info"]["instance_id"])
    (step, evaluate_once, evaluate) = await asyncio.to_thread(messages, log)
    assert step[0] == "ERROR"
    assert re.match(r"/step \(instance_id gone\) failed \(1 tries, .* s\): unknown_instance: ", step[1])
    assert evaluate_once[0] == "WARNING"
    assert "try 1 of 2 failed" in evaluate_once[1]
    assert evaluate[0] == "ERROR"
    assert "connection_failed" in evaluate[1]
    assert {match["pid"] for match in map(LINE.fullmatch, log.read_text().splitlines()) if match} == {str(os.getpid())}


async def test_a_traceback_is_one_line(tmp_path: Path, log: Path) -> None:
    async with (
        served("odd", scratch=tmp_path / "scratch") as server,
        EnvClient(server.call.url) as client,
        client.session("odd", "t") as session,
    ):
        await session.step("raise Exception")
    ((level, message),) = await asyncio.to_thread(messages, log)
    assert level == "ERROR"
    assert "env_error: Traceback" in message
    assert r"\n" in message
    assert "on demand" in message


def test_only_warnings_and_errors_are_kept_and_logged_exceptions_whole(log: Path) -> None:
    EnvClient()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # other handlers would choke on some of this
    logger.addHandler(silent := logging.NullHandler())
    try:
        logger.info("all is well")
        try:
            raise ValueError("first\r\nsecond\u2028third \ud83d")
        except ValueError:
            logger.exception("unforeseen")
        logger.error("x" * 1_000_000)
        logger.error("%d", "no number")
    finally:
        logger.removeHandler(silent)
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    traceback, long, wrong = messages(log)
    assert traceback[1].startswith(r"unforeseen\nTraceback (most recent call last):\n")
    assert traceback[1].endswith(r"ValueError: first\nsecond\nthird \ud83d")
    assert 65_000 < len(long[1]) < 70_000
    assert "more characters)" in long[1]
    assert "'%d'" in wrong[1]


def test_agentevolver_s_variable_is_known_and_ours_goes_first(
    tmp_path: Path, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIENT_LOG_PATH", str(tmp_path / "theirs"))
    EnvClient()
    logger.error("one")
    assert messages(tmp_path / "theirs") == [("ERROR", "one")]
    monkeypatch.setenv("AIOENV_CLIENT_LOG", "ours")  # from the folder that is the working directory now
    monkeypatch.chdir(tmp_path)
    EnvClient()
    monkeypatch.chdir("/")
    logger.error("two")
    assert messages(tmp_path / "ours") == [("ERROR", "two")]
    assert messages(tmp_path / "theirs") == [("ERROR", "one")]


def test_several_clients_write_each_line_once(log: Path) -> None:
    for _ in range(5):
        EnvClient()
    before = threading.active_count()
    logger.error("one")
    assert messages(log) == [("ERROR", "one")]
    assert threading.active_count() == before + 1


def test_nothing_is_kept_unless_asked_for(nobody: str, tmp_path: Path) -> None:
    code = """
import os, threading
os.chdir(sys.argv[2])
EnvClient(sys.argv[1], tries=1).evaluate("i1")
print([thread.name for thread in threading.enumerate()])
"""
    out, err = run(code, nobody, str(tmp_path))
    assert "aioenv-client-log" not in out
    assert "connection_failed" in err
    assert list(tmp_path.iterdir()) == []


def test_what_went_to_stderr_still_does(nobody: str, log: Path) -> None:
    assert "connection_failed" in run("EnvClient(sys.argv[1], tries=1).evaluate('i1')", nobody)[1]
    assert len(read(log)) == 1


# ---- that it is on disk


FAILING = """
print(EnvClient(sys.argv[1], tries=1).evaluate("i1").fallback, flush=True)
"""


def test_a_killed_process_has_left_its_lines(nobody: str, log: Path) -> None:
    with script(f"{FAILING}sys.stdin.read()", nobody) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        while not (log.exists() and log.read_text().endswith("\n")):
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    ((level, message),) = read(log)
    assert (level, "connection_failed" in message) == ("ERROR", True)


def test_lines_are_synced(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    fsync = os.fsync

    def spy(file: int) -> None:
        fsync(file)
        sizes.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fsync", spy)
    EnvClient()
    logger.error("one")
    messages(log)
    assert sizes == [log.stat().st_size]


def test_a_process_that_ends_at_once_has_left_its_lines(nobody: str, log: Path) -> None:
    code = f"""{FAILING}
import logging
logger = logging.getLogger("aioenv.client")
logger.addHandler(logging.NullHandler())
for number in range(500):
    logger.error("%d", number)
"""
    run(code, nobody)
    assert [message for _, message in read(log)][1:] == [str(number) for number in range(500)]


def test_forked_workers_write_their_own_lines_and_none_of_the_parent_s(nobody: str, log: Path) -> None:
    code = """
import logging, multiprocessing
logging.getLogger("aioenv.client").addHandler(logging.NullHandler())
client = EnvClient(sys.argv[1], tries=1)
def child(number):
    client.evaluate(f"child{number}")
workers = []
for number in range(3):
    for turn in range(20):
        client.step(f"parent{number}.{turn}")
    workers.append(multiprocessing.get_context("fork").Process(target=child, args=(number,)))
    workers[-1].start()
for worker in workers:
    worker.join()
"""
    run(code, nobody)
    subjects = Counter(message.split("instance_id ")[1].split(")")[0] for _, message in read(log))
    parents = [f"parent{number}.{turn}" for number in range(3) for turn in range(20)]
    assert subjects == Counter([*parents, "child0", "child1", "child2"])
    assert len({match["pid"] for match in map(LINE.fullmatch, log.read_text().splitlines()) if match}) == 4


def test_processes_tear_no_line_of_each_other(log: Path) -> None:
    code = """
import logging
EnvClient()
logger = logging.getLogger("aioenv.client")
logger.addHandler(logging.NullHandler())
print("ready", flush=True)
sys.stdin.readline()
for number in range(100):
    logger.error("%s %d", sys.argv[1] * 20_000, number)
"""
    writers = [script(code, letter) for letter in "abc"]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    assert [writer.communicate("go\n", timeout=100)[1] for writer in writers] == [""] * 3
    expected = {(letter * 20_000, str(number)) for letter in "abc" for number in range(100)}
    assert {tuple(message.split()) for _, message in read(log)} == expected


# ---- trouble


async def test_a_file_that_is_moved_or_removed_is_made_again(log: Path) -> None:
    EnvClient()
    logger.error("one")
    assert await asyncio.to_thread(messages, log) == [("ERROR", "one")]
    log.rename(log.with_suffix(".1"))
    logger.error("two")
    assert await asyncio.to_thread(messages, log) == [("ERROR", "two")]
    log.unlink()
    log.with_suffix(".1").unlink()
    log.parent.rmdir()
    logger.error("three")
    assert await asyncio.to_thread(messages, log) == [("ERROR", "three")]


@pytest.mark.parametrize("path", ["/dev/full", "{tmp}", "{tmp}/file/error.out", "/proc/none/error.out", "{tmp}/\0"])
async def test_what_can_not_be_written_is_told_once_and_fails_no_call(
    path: str, tmp_path: Path, nobody: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    path = path.format(tmp=tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, "CLIENT_LOG_PATH": path})  # which takes a zero byte, too
    async with EnvClient(nobody, tries=1) as client:
        for _ in range(3):
            assert (await client.evaluate("i1")).fallback is True
            assert await asyncio.to_thread(errorlog.flush, 60)
    told = [record for record in caplog.records if "can't be written" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]
    assert path in told[0].getMessage()
    assert len(caplog.records) == 4


def test_a_file_that_was_cut_short_goes_on_in_a_new_line_and_says_what_is_missing(tmp_path: Path) -> None:
    """As on a full disk: here, the size of its files is limited."""
    code = """
import logging, resource
from aioenv.client import errorlog
EnvClient()
logger = logging.getLogger("aioenv.client")
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
for letter in "abcd":
    logger.error(letter * 200)
    assert errorlog.flush(60)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
logger.error("after")
"""
    path = tmp_path / "error.out"
    _, err = run(code, AIOENV_CLIENT_LOG=str(path))
    assert err.count("can't be written") == 1
    whole, torn, note, after = path.read_text().splitlines()
    assert whole.endswith("a" * 200)
    assert 0 < torn.count("b") < 200
    assert note.endswith("3 messages are missing here")
    assert after.endswith("after")


async def test_a_file_that_takes_nothing_blocks_no_call_and_fills_no_memory(
    tmp_path: Path, nobody: str, log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe that nobody reads: opening it waits. Then somebody does."""
    monkeypatch.setattr(errorlog, "_MOST_QUEUED", 5)
    log.parent.mkdir(parents=True)
    os.mkfifo(log)
    async with EnvClient(nobody, tries=1) as client:
        for number in range(20):
            assert (await client.evaluate(f"i{number}")).fallback is True
    assert errorlog.flush(0.01) is False

    def read_all() -> tuple[int, int]:
        written, missing = 0, 0
        with open(log) as pipe:
            while written + missing < 20:
                if not (line := pipe.readline()):
                    time.sleep(0.01)  # between two batches
                    continue
                match = LINE.fullmatch(line.rstrip("\n")) or pytest.fail("a line is torn")
                note = re.fullmatch(r"(\d+) messages are missing here", match["message"])
                missing += int(note[1]) if note else 0
                written += not note
            assert errorlog.flush(60)
        return written, missing

    written, missing = await asyncio.to_thread(read_all)
    assert (written >= 5, missing >= 10) == (True, True)
    assert "can't be written" not in caplog.text


def test_an_exit_does_not_wait_for_ever_for_a_file_that_takes_nothing(nobody: str, log: Path) -> None:
    log.parent.mkdir(parents=True)
    os.mkfifo(log)
    code = f"from aioenv.client import errorlog\nerrorlog.flush.__defaults__ = (0.1,){FAILING}"
    assert run(code, nobody)[0] == "True\n"
