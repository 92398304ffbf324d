"""What is changed of AppWorld's engine changes nothing that can be seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def seen(engine_twins: dict[str, Any]) -> dict[str, Any]:
    """Both twins' view of every demo task."""
    result = {}
    for mode, (twin, out) in engine_twins.items():
        _, errors = twin.communicate(timeout=900)
        assert twin.returncode == 0, f"{mode}: {errors}"
        result[mode] = json.loads(out.read_text())
    return result


@pytest.mark.parametrize("what", ["observations", "completed", "score", "databases", "files"])
def test_adapted_and_stock_engine_show_the_same_on_all_demo_tasks(seen: dict[str, Any], what: str) -> None:
    stock, adapted = seen["stock"], seen["adapted"]
    assert len(stock) >= 36
    assert stock.keys() == adapted.keys()
    for task_id in stock:
        assert adapted[task_id][what] == stock[task_id][what], task_id


def test_the_twins_did_play(seen: dict[str, Any]) -> None:
    for task in seen["stock"].values():
        assert task["score"]["success"] is True
        assert task["completed"][-1] is True
        assert all(size > 1000 for size, _ in task["databases"].values())
        assert any(name.endswith("api_calls.jsonl") and len(text) > 100 for name, text in task["files"].items())


def test_another_version_of_appworld_runs_unadapted_with_one_warning(demo_root: Path, tmp_path: Path) -> None:
    code = """
import appworld, os
appworld.__version__ = "0.2.0"
from aioenv.envs.appworld.env import AppworldEnv
AppworldEnv.warm()
assert not AppworldEnv.forkable
task_id = open("data/datasets/train.txt").read().split()[0]
env = AppworldEnv(task_id, "mine", {"simple": True})
assert env.step({"content": "print(6 * 7)"}, {})["state"][0]["content"] == "42\\n"
assert os.path.exists(f"experiments/outputs/mine/tasks/{task_id}/logs/environment_io.md")
reply = env.step({"content": "apis.supervisor.complete_task(answer='wrong')"}, {"sparse": True})
assert (reply["is_terminated"], reply["reward"]) == (True, 0.0)
os._exit(0)
"""
    environ = {**os.environ, "APPWORLD_ROOT": str(demo_root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("version 0.2.0 is not 0.1.3.post1") == 1
