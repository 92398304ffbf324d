"""The command line, as a user types it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
from conftest import ENVS, DemoBuild, caller, serve_command


def run(*args: str, environ: dict[str, str] | None = None, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aioenv", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(environ or {})}
    )


def wait_for_end(pids: set[int]) -> None:
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in pids if psutil.pid_exists(pid)]
        time.sleep(0.02)


def test_an_unknown_env_exits_with_2_and_tells_what_exists() -> None:
    for args in (["--env", "nope"], []):
        done = run("serve", *args)
        assert done.returncode == 2
        assert "appworld, echo" in done.stderr


def test_bad_options_exit_with_2_and_name_the_option() -> None:
    for option, value in [("--port", "x"), ("--port", "99999"), ("--max-instances", "0"), ("--log-level", "loud")]:
        for done in (
            run("serve", "--env", "echo", option, value),
            run("serve", "--env", "echo", environ={f"AIOENV_{option[2:].replace('-', '_').upper()}": value}),
        ):
            assert (done.returncode, f"{option}: '{value}' is" in done.stderr) == (2, True), done.stderr
    done = run("serve", "--env", "echo", environ={"AIOENV_IDLE_TTL": "-1"})
    assert (done.returncode, "--idle-ttl" in done.stderr) == (2, True)
    assert run("serve", "--env", "echo", "--env-dir", "/nope").returncode == 2
    assert run().returncode == 2


def test_envs_lists_what_is_known() -> None:
    done = run("envs", "--env-dir", str(ENVS))
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "appworld", "bad", "broken", "count", "echo", "group", "odd",
    ]  # fmt: skip


def test_help_groups_and_explains_the_options() -> None:
    text = run("serve", "--help").stdout
    for group in ("envs:", "network:", "life of instances", "limits:", "other:", "AIOENV_IDLE_TTL"):
        assert group in text
    for option in ("--env", "--host", "--portal", "--port", "--env-dir", "--env-file", "--env_file_name", "--root",
                   "--idle-ttl", "--reap-interval", "--max-instances", "--log-level", "--keep-outputs"):  # fmt: skip
        assert option in text


def test_a_broken_env_module_shows_its_traceback_at_start() -> None:
    done = run("serve", "--env", "broken", "--env-dir", str(ENVS), "--port", "0")
    assert done.returncode == 1
    assert "broken_env.py" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_an_env_that_lacks_methods_or_is_none_is_told_at_start(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half/half_env.py").write_text("from aioenv.envs import BaseEnv\nclass HalfEnv(BaseEnv): pass\n")
    done = run("serve", "--env", "half", "--env-dir", str(tmp_path), "--port", "0")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "lacks methods: evaluate, get_init_state, get_query_list, step" in done.stderr
    done = run("serve", "--env", "json:JSONDecoder", "--port", "0")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "json:JSONDecoder is not a subclass of aioenv.envs.BaseEnv" in done.stderr


def test_a_root_that_has_no_data_is_refused(tmp_path: Path) -> None:
    for args, environ in [(("--root", str(tmp_path)), {}), ((), {"APPWORLD_ROOT": str(tmp_path)})]:
        done = run("serve", "--env", "appworld", "--port", "0", *args, environ=environ)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False)
        assert f"{tmp_path}, named by --root or APPWORLD_ROOT, has no AppWorld data" in done.stderr


def test_folders_that_cant_be_made_are_told() -> None:
    for option in ("--scratch", "--keep-outputs"):
        done = run("serve", "--env", "echo", "--port", "0", option, "/proc/nowhere")
        assert (done.returncode, "Traceback" in done.stderr) == (1, False)
        assert "/proc/nowhere" in done.stderr


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("serve", "--env", "echo", "--port", port)
    assert done.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_and_sigterm_end_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    args = ("--env", "odd", "--env-dir", str(ENVS), "--scratch", str(tmp_path))
    with serve_command(*args) as (url, server):
        async with caller(url) as call:
            await call.create()
            await call.post("get_env_profile")
        processes = {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
        assert len(processes) >= 4  # root, template, world, job
        server.send_signal(number)
        assert server.wait(30) == 0
    wait_for_end(processes)
    assert list(tmp_path.iterdir()) == []


async def test_kill_9_of_the_server_leaves_no_process_even_one_that_blocks(tmp_path: Path) -> None:
    args = ("--env", "odd", "--env-dir", str(ENVS), "--scratch", str(tmp_path))
    with serve_command(*args) as (url, server):
        async with caller(url) as call:
            await call.create("idle")
            await call.create("blocks")
            await call.post("get_env_profile")
            await call.say("idle", "escape")
            blocked = {"instance_id": "blocks", "messages": {"content": "block"}}
            with pytest.raises(TimeoutError):
                await call.session.post(f"{url}/step", json=blocked, timeout=aiohttp.ClientTimeout(1))
        processes = {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
        assert len(processes) >= 6
        server.kill()
        server.wait(10)
        wait_for_end(processes)


async def test_envs_by_file_by_class_and_by_environment_variable(tmp_path: Path) -> None:
    folder = tmp_path / "my_shop"
    folder.mkdir()
    (folder / "neighbour.py").write_text("GREETING = 'welcome'\n")
    (folder / "shop.py").write_text(
        "from aioenv.envs.echo import EchoEnv\nfrom neighbour import GREETING\n\n\n"
        "class MyShopEnv(EchoEnv):\n    def get_info(self, messages, params):\n        return GREETING\n"
    )
    environ = {
        "AIOENV_ENV": "my_shop,aioenv.envs.echo:EchoEnv",
        "AIOENV_ENV_DIR": str(tmp_path),
        "AIOENV_ENV_FILE": "shop",
        "AIOENV_SCRATCH": str(tmp_path / "scratch"),
    }
    with serve_command(environ=environ) as (url, _):
        async with caller(url) as call:
            mine = await call.create()
            assert (await call.post("get_info", instance_id=mine)).data == "welcome"
            theirs = await call.create(env_type="aioenv.envs.echo:EchoEnv")
            assert "no tools" in (await call.post("get_info", instance_id=theirs)).data


def test_the_server_process_imports_no_env_package() -> None:
    """Not while it starts, serves and lists tasks, and none of what AppWorld's env needs."""
    code = f"""
import asyncio, sys
from pathlib import Path
from aioenv.config import Settings
from aioenv.server.serve import running

async def main():
    async with running(Settings(envs=("echo", "odd"), port=0, env_dir=Path({str(ENVS)!r}))) as pool:
        for env in ("echo", "odd"):
            await pool.create(env, "t", env, {{}})
            await pool.task_ids(env, "train", {{}})
        await pool.call("step", "odd", {{"content": "history"}}, {{}})

asyncio.run(main())
bad = {{"appworld", "IPython", "fastapi", "sqlmodel", "jinja2", "aioenv.envs.appworld", "aioenv.envs.echo"}}
found = [name for name in sys.modules if name in bad or "odd_env" in name]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_demo_data_refuses_a_root_that_has_data(demo_root: Path) -> None:
    done = run("appworld", "demo-data", str(demo_root))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_without_a_root_demo_data_is_built_once_and_that_is_said(demo_build: DemoBuild) -> None:
    assert len(demo_build.said) == 2
    for said in demo_build.said:
        told = [line for line in said.splitlines() if line.startswith("appworld: ") and "unpacking" not in line]
        assert len(told) == 2, said
        assert f"aioenv's own DEMO data in {demo_build.root}" in told[0]
        assert "appworld download data --root DIR" in told[1]
    assert not [path for path in demo_build.root.iterdir() if path.name.startswith(".data-")]
