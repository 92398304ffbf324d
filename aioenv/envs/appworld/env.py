"""AppWorld (https://appworld.dev) as an env: a Python interpreter over nine simulated apps.

`params` of a create: `simple` (bool: short prompt, bare observations, fences not needed), `prompt` (bool: false leaves
out all of the system prompt but the task's header) and `world` (object: settings of `appworld.AppWorld`).
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aioenv.envs.appworld import engine, install, prompt
from aioenv.envs.appworld.action import parse_action
from aioenv.envs.base import BaseEnv
from aioenv.envs.registry import Registry
from aioenv.errors import BadRequest, EnvError, UnknownTask

SPLIT_ALIASES = {"val": "dev", "test": "test_normal"}
TASK_ID = re.compile(r"[A-Za-z0-9]+_[0-9]+")
# Settings of `AppWorld(...)` that are the service's own, not a caller's.
OURS = {
    "experiment_name", "load_ground_truth", "ground_truth_mode",
    "remote_apis_url", "remote_environment_url", "remote_docker",
}  # fmt: skip
# The calls that episodes begin with: what the engine builds at its first use of them is shared by all worlds then.
_WARMING = """
print(apis.supervisor.show_profile())
print(apis.supervisor.show_account_passwords())
for app in apis.api_docs.show_app_descriptions():
    print(apis.api_docs.show_api_descriptions(app_name=app["name"]))
    print(apis.api_docs.show_api_doc(app_name=app["name"], api_name="login"))
"""


@Registry.register("appworld")
class AppworldEnv(BaseEnv):
    """One AppWorld task. The engine's root is the world's own folder, with a link to the shared `data`."""

    def __init__(self, task_id: str, instance_id: str, params: dict[str, Any]) -> None:
        super().__init__(task_id, instance_id, params)
        self.simple = _flag(params, "simple", False)
        self.show_prompt = _flag(params, "prompt", True)
        settings = _world_settings(params.get("world"))
        root = _move_root(Path.cwd())
        if not TASK_ID.fullmatch(task_id) or not (root / "data" / "tasks" / task_id / "specs.json").is_file():
            raise UnknownTask(f"unknown task {task_id!r}; POST /get_env_profile lists the task ids of a split")
        self.world = engine.make_world(
            task_id=task_id, experiment_name=instance_id, load_ground_truth=False, **settings
        )

    def get_init_state(self, params: dict[str, Any]) -> dict[str, Any]:
        task = self.world.task
        system = prompt.system_prompt(task.supervisor, simple=self.simple, example=self.show_prompt)
        return {
            "state": [{"role": "system", "content": system}, {"role": "user", "content": task.instruction}],
            "reward": 0.0,
            "is_terminated": False,
            "info": {},
        }

    def step(self, action: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        """Runs the code. `params.sparse` chooses the reward of the step that completes the task; others have 0.0."""
        sparse = _flag(params, "sparse", False)
        parsed = parse_action(action, self.simple)
        output = self._execute(parsed.code) if parsed.code is not None else str(parsed.problem)
        terminated = engine.task_completed(self.world)
        observation = output if self.simple else f"Output:\n```\n{output.rstrip()}\n```"
        return {
            "state": [{"role": "user", "content": f"{observation}\n{parsed.note}" if parsed.note else observation}],
            "reward": self._score(sparse) if terminated else 0.0,
            "is_terminated": terminated,
            "info": {},
        }

    def _execute(self, code: str) -> str:
        """What the engine says to the code. Whatever the code raises is the agent's to see."""
        try:
            return str(self.world.execute(code))
        except BaseException as error:
            if _failed_to_save(error):
                raise
            return self._record_failure(code, error)

    def _record_failure(self, code: str, error: BaseException) -> str:
        """Do what the engine leaves undone where the code raised what it does not expect: what is no Exception
        (SystemExit, KeyboardInterrupt), or one that can't be shown."""
        world = self.world
        world.safety_guard.disable()
        message = f"Execution failed. Traceback:\n{_last_line(error)}"
        world.environment_io.append({"input": code, "output": message})
        world.num_interactions += 1
        world.requester.reset_request_count()
        return message

    def evaluate(self, messages: dict[str, Any], params: dict[str, Any]) -> float:
        """The share of the task's requirements that are met; with `params.sparse`, 1.0 only if all are."""
        return self._score(_flag(params, "sparse", False))

    def _score(self, sparse: bool) -> float:
        from appworld.evaluator import evaluate_task

        self.save()  # the scoring reads it
        tests = evaluate_task(self.task_id, self.instance_id)
        # It may leave the models of some apps at the databases of the start, where the next step would then act.
        self.world.models.reset_db_home_path()
        if sparse:
            return 1.0 if tests.success else 0.0
        return float(tests.pass_count / tests.num_tests)

    def get_info(self, messages: dict[str, Any], params: dict[str, Any]) -> str:
        return prompt.tool_info()

    def save(self) -> None:
        for entry in self.world.environment_io:  # code may print half a surrogate pair, which no file can hold
            entry.update({key: _encodable(text) for key, text in entry.items()})
        engine.save(self.world)

    def before_fork(self) -> None:
        engine.rest(self.world)

    def after_fork(self) -> None:
        _move_root(Path.cwd())
        engine.wake(self.world, self.instance_id)

    @staticmethod
    def get_query_list(split: str, params: dict[str, Any]) -> list[str]:
        """AppWorld's own list of `train`, `dev` (or `val`), `test_normal` (or `test`), `test_challenge`."""
        folder = Path(os.environ["APPWORLD_ROOT"]) / "data" / "datasets"
        splits = sorted(file.stem for file in folder.glob("*.txt"))
        name = SPLIT_ALIASES.get(split, split)
        if name not in splits:
            aliases = ", ".join(f"{alias} for {real}" for alias, real in SPLIT_ALIASES.items())
            raise BadRequest(f"unknown split {split!r}; there is: {', '.join(splits)} ({aliases})")
        lines = (folder / f"{name}.txt").read_text(encoding="utf-8").split()
        return [line.partition(":")[0] for line in lines]  # what follows a colon is a tag

    # -- hooks -------------------------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls, options: Mapping[str, str]) -> dict[str, str]:
        def report(line: str) -> None:
            sys.stderr.write(f"appworld: {line}\n")
            sys.stderr.flush()

        named = options.get("root") or os.environ.get("APPWORLD_ROOT")  # importing appworld sets it, too
        try:
            install.unpack_apps(report)
            return {"APPWORLD_ROOT": str(install.find_root(named, report))}
        except (ImportError, OSError) as error:
            raise EnvError(str(error)) from None

    @classmethod
    def warm(cls) -> None:
        """Build a world and throw it away: the engine builds its apps lazily, which takes seconds, once."""
        os.environ["IPYTHONDIR"] = str(Path.cwd() / ".ipython")
        _move_root(Path.cwd())
        import pytest  # noqa: F401 - the scoring imports it at its first comparison
        from appworld import AppWorld

        task_id = min(folder.name for folder in Path("data/tasks").iterdir() if TASK_ID.fullmatch(folder.name))
        world = AppWorld(task_id=task_id, experiment_name="warm", load_ground_truth=False)
        world.execute(_WARMING)
        world.close()
        AppWorld.close_all()
        cls.forkable = engine.adapt()
        others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        if others:
            sys.stderr.write(f"appworld: threads are left after warming, forks may hang: {', '.join(others)}\n")


def _move_root(folder: Path) -> Path:
    """Make `folder` the engine's root, so that all its output lands there; `data` is linked, not copied."""
    data = os.environ.setdefault("AIOENV_APPWORLD_DATA", str((Path(os.environ["APPWORLD_ROOT"]) / "data").resolve()))
    link = folder / "data"
    if not link.exists():
        link.symlink_to(data)
    os.environ["APPWORLD_ROOT"] = str(folder)
    return folder


def _flag(params: dict[str, Any], key: str, default: bool) -> bool:
    value = params.get(key, default)
    if not isinstance(value, bool):
        raise BadRequest(f'"params.{key}" must be true or false, not {value!r}')
    return value


def _world_settings(world: Any) -> dict[str, Any]:
    """`params.world`, checked against what AppWorld knows."""
    if world is None:
        return {}
    from appworld.environment import AppWorldInitDefaults

    known = sorted(set(AppWorldInitDefaults.__fields__) - OURS)
    if not isinstance(world, dict):
        raise BadRequest(f'"params.world" must be an object with any of: {", ".join(known)}')
    unknown = sorted(set(world) - set(known))
    if unknown:
        raise BadRequest(f'"params.world" has unknown names: {", ".join(unknown)}; the known ones: {", ".join(known)}')
    try:
        checked = AppWorldInitDefaults(**world)
    except ValueError as error:
        raise BadRequest(f'"params.world": {error}') from None
    return {key: getattr(checked, key) for key in world}


def _failed_to_save(error: BaseException) -> bool:
    """It came from the engine's writing to disk (if that is not put off): no fault of the agent."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name in ("_save_state", "save_logs") for frame in frames)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _last_line(error: BaseException) -> str:
    try:
        return _encodable(f"{type(error).__name__}: {error}".removesuffix(": "))
    except BaseException:  # its __str__ raises
        return type(error).__name__
