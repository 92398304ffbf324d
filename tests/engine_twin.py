"""Plays every demo task's gold solution and writes down all that can be seen of it; for test_engine.py.

usage: engine_twin.py stock|adapted ROOT SCRATCH OUT.json

`stock` uses AppWorld as it comes, without anything of aioenv; `adapted` uses our env as the service does, in a world
that is a copy of its group's. Each task is played in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioenv.envs.appworld.demo import gold_steps

PROBE = "import random\nprint(random.random(), DateTime.now())"
NAME = "twin"


def look(world: Any, observations: list[str], completed: list[bool]) -> dict[str, Any]:
    """What is to be seen at the end.

    Databases first, as scoring leaves the models at those of the start; files last, as it writes one.
    """
    from appworld.apps import get_all_apps
    from appworld.common.utils import import_models_module
    from appworld.evaluator import evaluate_task

    databases = {}
    for app in get_all_apps():
        connection = import_models_module(app).SQLModel.db.connection
        dump = "\n".join(connection.iterdump())
        databases[app] = [len(dump), hashlib.sha256(dump.encode()).hexdigest()]
    score = evaluate_task(world.task_id, NAME).to_dict()
    outputs = Path(world.output_directory)
    files = {str(file.relative_to(outputs)): file.read_text() for file in sorted(outputs.rglob("*")) if file.is_file()}
    # Each scoring leaves empty entries in it, and the env scores once more, for the last step's reward.
    hashes = "dbs/model_hashes.json"
    files[hashes] = json.dumps({app: of for app, of in json.loads(files[hashes]).items() if of}, sort_keys=True)
    return {
        "observations": observations,
        "completed": completed,
        "score": score,
        "databases": databases,
        "files": files,
    }


def play_stock(task_id: str, steps: list[str]) -> dict[str, Any]:
    from appworld import AppWorld

    world = AppWorld(task_id=task_id, experiment_name=NAME, load_ground_truth=False)
    observations, completed = [], []
    for code in steps:
        observations.append(world.execute(code))
        completed.append(world.task_completed())
    return look(world, observations, completed)


def play_adapted(task_id: str, steps: list[str]) -> dict[str, Any]:
    from aioenv.envs.appworld.env import AppworldEnv

    env = AppworldEnv(task_id, "group", {"simple": True})
    env.get_init_state({})
    env.before_fork()
    pid = os.fork()
    if pid != 0:
        assert os.waitpid(pid, 0)[1] == 0
        os._exit(0)
    Path("copy").mkdir()
    os.chdir("copy")
    env.instance_id = NAME
    env.after_fork()
    observations, completed = [], []
    for code in steps:
        reply = env.step({"content": code}, {})
        observations.append(reply["state"][0]["content"])
        completed.append(reply["is_terminated"])
    env.save()
    return look(env.world, observations, completed)


def in_a_process(play: Callable[[str, list[str]], dict[str, Any]], task_id: str, root: Path, folder: Path) -> Any:
    folder.mkdir(parents=True)
    if os.fork() == 0:
        try:
            os.chdir(folder)
            seen = play(task_id, [PROBE, *gold_steps(root, task_id)])
            (folder / "seen.json").write_text(json.dumps(seen, default=str))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.wait()[1] == 0, task_id
    return json.loads((folder / "seen.json").read_text())


def main() -> None:
    mode, root, scratch, out = sys.argv[1], *map(Path, sys.argv[2:])
    os.environ["APPWORLD_ROOT"] = str(root)
    template = scratch / "template"
    template.mkdir(parents=True)
    os.chdir(template)
    if mode == "adapted":
        from aioenv.envs.appworld.env import AppworldEnv

        AppworldEnv.warm()
        assert AppworldEnv.forkable
        play = play_adapted
    else:
        # Its output goes to its root: one of its own, with a link to the data.
        (template / "data").symlink_to(root / "data")
        os.environ["APPWORLD_ROOT"] = str(template)
        play = play_stock
    datasets = root / "data" / "datasets"
    task_ids = [task_id for file in sorted(datasets.glob("*.txt")) for task_id in file.read_text().split()]
    if mode == "stock":
        # Its first world takes seconds to build; those forked from here do without.
        from appworld import AppWorld

        AppWorld(task_id=task_ids[0], experiment_name="warm", load_ground_truth=False).close()
        AppWorld.close_all()
    seen = {task_id: in_a_process(play, task_id, root, scratch / task_id) for task_id in task_ids}
    out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
