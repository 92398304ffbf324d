"""Servers to test against, all real: on loopback, with real processes. Nothing may be left of them afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import io
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import pytest

from aioenv.config import Limits, Settings
from aioenv.pool.pool import Pool
from aioenv.server.serve import running

ENVS = Path(__file__).parent / "envs"
_session_processes: set[int] = set()


@dataclass
class Reply:
    """What came back over HTTP."""

    status: int
    body: Any
    headers: Any

    @property
    def data(self) -> Any:
        assert self.status == 200, self.body
        return self.body["data"]

    @property
    def error(self) -> Any:
        assert self.status >= 400, self.body
        assert self.body["success"] is False
        assert self.body["detail"] == self.body["error"]["message"]
        return self.body["error"]


class Caller:
    """Sends requests as any client of the protocol might, also ones that no sane client would."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, route: str, raw: bytes | None = None, **body: Any) -> Reply:
        # From a file: aiohttp warns of large bodies given as bytes.
        data = io.BytesIO(orjson.dumps(body) if raw is None else raw)
        headers = {"Content-Type": "application/json"}
        async with self.session.post(f"{self.url}/{route}", data=data, headers=headers) as response:
            return Reply(response.status, await response.json(), response.headers)

    async def get(self, route: str) -> Reply:
        async with self.session.get(f"{self.url}/{route}") as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return Reply(response.status, await response.json() if is_json else text, response.headers)

    async def create(self, instance_id: str | None = None, **body: Any) -> str:
        reply = await self.post("create", **{"task_id": "t", "instance_id": instance_id, **body})
        return str(reply.data["info"]["instance_id"])

    async def say(self, instance_id: str, content: Any, **params: Any) -> Reply:
        return await self.post(
            "step", instance_id=instance_id, messages={"role": "assistant", "content": content}, params=params
        )


@contextlib.asynccontextmanager
async def caller(url: str) -> AsyncIterator[Caller]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Caller(url, session)


@dataclass
class Server:
    """A server in the test's own process and loop."""

    pool: Pool
    call: Caller


@contextlib.asynccontextmanager
async def served(*envs: str, limits: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Server]:
    """A server of `envs` on a free port, until the block ends."""
    urls: list[str] = []
    made = Settings(
        envs=envs or ("echo",), port=0, env_dir=ENVS, limits=replace(Limits(), **(limits or {})), **settings
    )
    async with running(made, urls.append) as pool, caller(urls[0]) as call:
        yield Server(pool, call)


@pytest.fixture
async def echo(tmp_path: Path) -> AsyncIterator[Server]:
    async with served("echo", scratch=tmp_path / "scratch") as server:
        yield server


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `-n 2 --dist loadgroup`: what shares a server stays together, and what takes longest begins first."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        group = "appworld" if fixtures & {"demo_build", "demo_root", "engine_twins"} else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        first = ("appworld", "test_demo_data.py", "test_chaos.py", "test_misbehaviour.py")
        ranks = {group: rank for rank, group in enumerate(first)}
        items.sort(key=lambda item: ranks.get(next(item.iter_markers("xdist_group")).args[0], len(first)))


# -- AppWorld ----------------------------------------------------------------------------------------------------------


@dataclass
class DemoBuild:
    """Demo data as a first start makes it, and what each server said on its standard error."""

    root: Path
    said: list[str]


@pytest.fixture(scope="session")
def demo_build(tmp_path_factory: pytest.TempPathFactory) -> DemoBuild:
    """Two servers started at once, which are told of no root: one builds the data, the other waits for it."""
    cache = tmp_path_factory.mktemp("cache")
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache), "AIOENV_SCRATCH": str(cache / "scratch"), "AIOENV_PORT": "0"}
    environ.pop("APPWORLD_ROOT", None)
    command = [sys.executable, "-m", "aioenv", "serve", "--env", "appworld", "--log-level", "error"]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    servers = [subprocess.Popen(command, cwd=cache, env=environ, **piped) for _ in range(2)]
    said = []
    try:
        for server in servers:
            assert server.stdout is not None
            lines = [server.stdout.readline(), server.stdout.readline()]
            server.send_signal(signal.SIGTERM)
            said.append(server.communicate(timeout=60)[1])
            assert (lines[1], server.returncode) == ("ready\n", 0), said
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    (root,) = (cache / "aioenv").iterdir()
    return DemoBuild(root, said)


@pytest.fixture(scope="session")
def demo_root(demo_build: DemoBuild) -> Path:
    """An AppWorld root with our demo data, built once for the whole run."""
    return demo_build.root


@pytest.fixture(scope="session")
def engine_twins(demo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """For test_engine.py: both twins at play, with the files that they write at their end. They take a while, so they
    begin when the first test of AppWorld does."""
    folder = tmp_path_factory.mktemp("twins")
    twins = {}
    for mode in ("stock", "adapted"):
        out = folder / f"{mode}.json"
        script = str(Path(__file__).with_name("engine_twin.py"))
        twin = subprocess.Popen(
            [sys.executable, script, mode, str(demo_root), str(folder / mode), str(out)],
            # The engine writes some columns in the order of a set.
            env={**os.environ, "PYTHONHASHSEED": "0"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _session_processes.add(twin.pid)
        twins[mode] = (twin, out)
    yield twins
    for twin, _ in twins.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(twin.pid, signal.SIGKILL)
        twin.communicate()


@contextlib.contextmanager
def serve_command(*args: str, environ: dict[str, str] | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`python -m aioenv serve …` on a free port, as a user starts it: its URL, when it is ready, and its process."""
    command = [sys.executable, "-m", "aioenv", "serve", "--port", "0", "--log-level", "warning", *args]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})})
    assert popen.stdout is not None
    try:
        url = popen.stdout.readline().split("listening on ")[1].split(",")[0].strip()
        assert popen.stdout.readline().strip() == "ready"
        yield url, popen
    finally:
        if popen.poll() is None:
            popen.send_signal(signal.SIGTERM)
        try:
            popen.wait(60)
        finally:
            popen.kill()
            popen.stdout.close()
            popen.wait()


@pytest.fixture(scope="session")
def appworld_scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("appworld-scratch")


@pytest.fixture(scope="session")
def appworld_url(request: pytest.FixtureRequest, demo_root: Path, appworld_scratch: Path) -> Iterator[str]:
    """One AppWorld server for all tests that don't need their own."""
    if any("test_engine.py" in item.nodeid for item in request.session.items):
        request.getfixturevalue("engine_twins")
    scratch = ("--scratch", str(appworld_scratch))
    with serve_command("--env", "appworld", "--root", str(demo_root), *scratch) as (url, server):
        _session_processes.add(server.pid)
        yield url
    assert list(appworld_scratch.iterdir()) == []


@pytest.fixture
async def appworld(appworld_url: str) -> AsyncIterator[Caller]:
    async with caller(appworld_url) as call:
        yield call
        left = (await call.get("instances")).body
    assert left == [], "a test left instances behind"


# -- nothing is left ---------------------------------------------------------------------------------------------------


def _descendants() -> set[int]:
    """Without those of processes that live as long as the session, which may come and go."""
    found = set()
    for child in psutil.Process().children():
        found |= {child.pid} if child.pid in _session_processes else {child.pid, *_pids(child.children(recursive=True))}
    return found


def _pids(processes: list[psutil.Process]) -> set[int]:
    return {process.pid for process in processes}


@pytest.fixture(autouse=True)
async def _nothing_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """After each test: no process, listening socket or file descriptor more than before it.

    Set up first and so torn down last of a test's own fixtures; those of the session are told apart by being there.
    """
    for name in ("appworld_url", "engine_twins"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    processes, fds = _descendants(), len(os.listdir("/proc/self/fd"))
    yield
    for _ in range(100):  # what was told to end may need a moment
        if _descendants() <= processes and len(os.listdir("/proc/self/fd")) <= fds:
            break
        await asyncio.sleep(0.05)
    left = [psutil.Process(pid).cmdline() for pid in _descendants() - processes if psutil.pid_exists(pid)]
    assert left == [], "processes are left"
    open_now = os.listdir("/proc/self/fd")
    assert len(open_now) <= fds, "file descriptors are left"


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_at_the_end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the suite: no child process, no listening socket, no scratch folder in the usual place."""
    # Python's own helper of the executor: one for the interpreter, with which it ends.
    multiprocessing.resource_tracker.ensure_running()
    tracker = multiprocessing.resource_tracker._resource_tracker._pid
    temporary = tmp_path_factory.mktemp("tmp")
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    yield
    this = psutil.Process()
    assert [child.cmdline() for child in this.children(recursive=True) if child.pid != tracker] == []
    listening = [c for c in psutil.net_connections("tcp") if c.pid == this.pid and c.status == psutil.CONN_LISTEN]
    assert listening == []
    assert list(temporary.iterdir()) == []
