"""The benchmark scripts run, and write what they say. Never what they measure: that needs a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import serve_command

BENCH = Path(__file__).parent.parent / "bench"


def run(script: str, *options: str, file: Path) -> tuple[str, dict[str, Any]]:
    """A script's stdout, and the results in its JSON file."""
    command = [sys.executable, str(BENCH / script), *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads(file.read_text(encoding="utf-8"))
    assert body["benchmark"] == script.removesuffix(".py")
    assert body["machine"].keys() == {"cores", "cpu", "memory_gib", "kernel", "python", "load_average"}
    assert script in body["command"]
    assert body["date"] in done.stdout
    results: dict[str, Any] = body["results"]
    return done.stdout, results


def test_load_plays_all_episodes_and_measures_memory(tmp_path: Path) -> None:
    with serve_command("--env", "echo") as (url, server):
        options = ("--env", "echo", "--episodes", "5", "--concurrency", "2", "--steps", "3", "--pid", str(server.pid))
        text, results = run("load.py", url, *options, file=tmp_path / "load.json")
    assert (results["episodes"], results["failed"], results["errors"]) == (5, 0, {})
    calls = {route: figures["count"] for route, figures in results["routes"].items()}
    assert calls == {"get_env_profile": 1, "create": 5, "step": 15, "evaluate": 5, "release": 5}
    for figures in results["routes"].values():
        assert figures.keys() == {"count", "p50_ms", "p95_ms", "max_ms"}
    assert results.keys() >= {"seconds", "episodes_per_second", "steps_per_second"}
    assert results["memory"]["instances alive"] == 2
    assert results["memory"]["MiB per instance"] is not None
    assert "/release" in text


def test_load_says_what_the_server_refuses(tmp_path: Path) -> None:
    with serve_command("--env", "echo", "--max-instances", "1", "--create-queue", "0") as (url, _):
        options = (url, "--env", "echo", "--episodes", "2", "--concurrency", "2", "--steps", "1")
        command = [sys.executable, str(BENCH / "load.py"), *options, "--json", str(tmp_path / "load.json")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    results = json.loads((tmp_path / "load.json").read_text(encoding="utf-8"))["results"]
    assert (results["episodes"], results["failed"]) == (1, 1)
    (error,) = results["errors"]
    assert error.startswith("/create: 503 ")


def test_large_bodies_are_sent_beside_small_ones(tmp_path: Path) -> None:
    text, results = run("large.py", "--mb", "2", "--seconds", "0.5", file=tmp_path / "large.json")
    assert results["large_steps"] > 0
    for when in ("alone", "beside"):
        assert results[when].keys() == {"health", "small step"}
        assert results[when]["health"].keys() == {"count", "p50_ms", "p99_ms", "max_ms"}
    assert "health, beside 1 of 2 MB" in text


def test_overhead_compares_the_two(tmp_path: Path) -> None:
    options = ("--connections", "1,3", "--rounds", "1", "--seconds", "0.1")
    text, results = run("overhead.py", *options, file=tmp_path / "overhead.json")
    assert results["loop"] in ("asyncio", "uvloop")
    assert results["connections"].keys() == {"1", "3"}
    for entry in results["connections"].values():
        assert entry.keys() == {"echo", "bare", "rate_ratio", "latency_ratio"}
        assert entry["rate_ratio"] is not None
        assert entry["echo"].keys() == entry["bare"].keys() >= {"requests_per_second", "p50_us", "p95_us"}
    assert "at 3 connections" in text


def test_branches_are_compared_with_creates(demo_root: Path, tmp_path: Path) -> None:
    options = ("--root", str(demo_root), "--repeats", "2", "--bursts", "1", "--at-once", "2", "--steps", "1")
    text, results = run("branch.py", *options, file=tmp_path / "branch.json")
    assert results["kinds"].keys() == {"branch", "create"}
    for figures in results["kinds"].values():
        assert figures["worlds"] == 2
        assert figures["private_mib"] > 0
    assert results["ratios"].keys() == {"p50_ms", "p95_ms", "at_once_p50_ms", "at_once_max_ms", "private_mib"}
    assert "to the first answered step" in text
