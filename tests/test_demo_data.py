"""The demo data: what it promises about its contents, and that building it is deterministic and all-or-nothing."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from aioenv.envs.appworld.demo import build, gold_steps

REPOSITORY = Path(__file__).resolve().parent.parent
SPLITS = {"train": 6, "dev": 2, "test_normal": 3, "test_challenge": 3}
"""The least number of scenarios per split."""
APPS = {"amazon", "file_system", "gmail", "phone", "simple_note", "splitwise", "spotify", "todoist", "venmo"}
BUILD = """
import sys
from pathlib import Path
from aioenv.envs.appworld.demo import build
build(Path(sys.argv[1]), rows=1500, seed=7)
"""


BY_COMMAND = ["-m", "aioenv", "appworld", "demo-data", "--rows", "1500", "--seed", "7"]


def _start_build(how: list[str], root: Path, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    command = [sys.executable, "-W", "ignore", *how, str(root)]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _hashes(root: Path) -> dict[str, str]:
    files = sorted(path for path in (root / "data").rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two roots with the same seed and filler, built in processes that differ in all that must not matter."""
    roots = [tmp_path_factory.mktemp("twins") / name for name in ("one", "two")]
    surroundings = (
        {"PYTHONHASHSEED": "1", "TZ": "UTC", "LC_ALL": "C"},
        {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8"},
    )
    ways = (["-c", BUILD], BY_COMMAND)
    builds = [_start_build(how, root, **extra) for how, root, extra in zip(ways, roots, surroundings, strict=True)]
    for process in builds:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return roots


def _task_ids(root: Path, split: str) -> list[str]:
    return (root / "data" / "datasets" / f"{split}.txt").read_text(encoding="utf-8").split()


def _all_ids(root: Path) -> list[str]:
    return [task_id for split in SPLITS for task_id in _task_ids(root, split)]


def _truth(root: Path, task_id: str, name: str) -> Any:
    path = root / "data" / "tasks" / task_id / "ground_truth" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _specs(root: Path, task_id: str) -> dict[str, Any]:
    specs: dict[str, Any] = json.loads((root / "data" / "tasks" / task_id / "specs.json").read_text(encoding="utf-8"))
    return specs


@pytest.mark.timeout(400)
def test_same_seed_gives_equal_files_byte_for_byte(twins: list[Path]) -> None:
    one, two = (_hashes(root) for root in twins)
    assert [name for name in one if one[name] != two.get(name)] == []
    assert one.keys() == two.keys()


@pytest.mark.timeout(400)
def test_another_seed_gives_other_answers_to_the_same_tasks(twins: list[Path], demo_root: Path) -> None:
    assert _all_ids(twins[0]) == _all_ids(demo_root)
    for name in ("answer", "private_data"):
        assert [_truth(twins[0], task, name) for task in _all_ids(demo_root)] != [
            _truth(demo_root, task, name) for task in _all_ids(demo_root)
        ]


@pytest.mark.timeout(400)
def test_a_build_leaves_nothing_but_the_data(twins: list[Path]) -> None:
    assert [path.name for path in twins[0].iterdir()] == ["data"]


def test_an_existing_data_folder_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(FileExistsError, match="exists already: delete it first"):
        build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_importing_the_package_does_not_import_appworld() -> None:
    code = "import sys, aioenv.envs.appworld.demo; sys.exit('appworld' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_every_split_has_its_scenarios_of_three_tasks(demo_root: Path) -> None:
    seen: set[str] = set()
    for split, least in SPLITS.items():
        ids = _task_ids(demo_root, split)
        scenarios = list(dict.fromkeys(task_id.split("_")[0] for task_id in ids))
        assert len(scenarios) >= least
        assert ids == [f"{scenario}_{number}" for scenario in scenarios for number in (1, 2, 3)]
        assert seen.isdisjoint(ids)
        seen.update(ids)
    assert {path.name for path in (demo_root / "data" / "tasks").iterdir()} == seen
    assert len(seen) >= 14 * 3


def test_scenarios_cover_all_apps_difficulties_and_kinds(demo_root: Path) -> None:
    ids = _all_ids(demo_root)
    apps = {task_id.split("_")[0]: set(_truth(demo_root, task_id, "required_apps")) for task_id in ids}
    assert set().union(*apps.values()) == APPS
    assert sum(len(names) > 1 for names in apps.values()) >= 5
    assert {_truth(demo_root, task_id, "metadata")["difficulty"] for task_id in ids} == {1, 2, 3}
    questions = [task_id for task_id in ids if _truth(demo_root, task_id, "answer") is not None]
    assert len(ids) / 3 <= len(questions) <= 2 * len(ids) / 3


def test_the_tasks_of_a_scenario_differ(demo_root: Path) -> None:
    ids = _all_ids(demo_root)
    for first in range(0, len(ids), 3):
        siblings = ids[first : first + 3]
        outcomes = [
            json.dumps([_truth(demo_root, task_id, n) for n in ("answer", "private_data")]) for task_id in siblings
        ]
        assert len(set(outcomes)) == 3, siblings
        assert len({_specs(demo_root, task_id)["supervisor"]["email"] for task_id in siblings}) == 3, siblings


def test_every_evaluation_has_the_requirements_that_it_lists(demo_root: Path) -> None:
    for task_id in _all_ids(demo_root):
        listed = _truth(demo_root, task_id, "test_data")
        source = (demo_root / "data" / "tasks" / task_id / "ground_truth" / "evaluation.py").read_text(encoding="utf-8")
        written = [
            dedent(ast.literal_eval(node.items[0].context_expr.args[0])).strip()  # type: ignore[attr-defined]
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.With)
        ]
        assert [entry["requirement"] for entry in listed] == written
        assert len(set(written)) == len(written) >= 3
        assert {entry["label"] for entry in listed} == {"no_op_fail", "no_op_pass"}


def test_metadata_tells_the_truth_about_the_solution(demo_root: Path) -> None:
    for task_id in _all_ids(demo_root):
        metadata = _truth(demo_root, task_id, "metadata")
        called = {call for block in gold_steps(demo_root, task_id) for call in _api_calls(block)}
        assert metadata["mode"] == "full"
        assert metadata["num_apis"] == len(called)
        assert metadata["num_apps"] == len({app for app, _ in called} - {"supervisor"})
        assert sorted({app for app, _ in called} - {"supervisor"}) == _truth(demo_root, task_id, "required_apps")
        assert metadata["num_api_calls"] >= metadata["num_apis"]


def _api_calls(block: str) -> list[tuple[str, str]]:
    """(app, api) of all places in the code that call `apis.app.api(...)`."""
    return [
        (node.value.attr, node.attr)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "apis"
    ]


def test_gold_steps_are_runnable_blocks_and_only_the_last_completes_the_task(demo_root: Path) -> None:
    for task_id in _all_ids(demo_root):
        steps = gold_steps(demo_root, task_id)
        assert 3 <= len(steps) <= 8, task_id
        completing = [("supervisor", "complete_task") in _api_calls(step) for step in steps]
        assert completing == [False] * (len(steps) - 1) + [True], task_id
        answer = _truth(demo_root, task_id, "answer")
        assert steps[-1].endswith("complete_task()") == (answer is None), task_id


def test_gold_steps_accepts_the_root_as_text(demo_root: Path) -> None:
    assert gold_steps(str(demo_root), "demo01_1") == gold_steps(demo_root, "demo01_1")


@pytest.mark.parametrize("task_id", ["demo99_1", "", "..", "../tasks/demo01_1", "demo01_1/ground_truth"])
def test_gold_steps_says_where_it_looked_for_an_unknown_task(demo_root: Path, task_id: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no task .* the ids are listed in"):
        gold_steps(demo_root, task_id)


def test_gold_steps_explains_a_missing_solution(tmp_path: Path) -> None:
    (tmp_path / "data" / "tasks" / "abc_1" / "ground_truth").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has no gold solution"):
        gold_steps(tmp_path, "abc_1")


def test_gold_steps_explains_a_file_without_a_solution_function(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "tasks" / "abc_1" / "ground_truth"
    folder.mkdir(parents=True)
    (folder / "compiled_solution.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="defines no function named solution"):
        gold_steps(tmp_path, "abc_1")
