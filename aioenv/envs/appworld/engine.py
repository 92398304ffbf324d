"""What is changed of AppWorld's engine to make worlds cheap, all in this module, for the version it was written for.

1. The base databases are in the template's memory, once for what a world starts from and once for what scoring compares
   it with. A fork gets them copy-on-write and plays the task's changes on top. Untouched, the engine copies each base
   database three times for a new world.
2. Saving all databases and the logs after every step is put off until somebody wants to read the files (`save`).
3. Whether the task is complete is read from the supervisor's database, not asked of its API.
4. A world can be forked (`rest`, `wake`): the API client's thread ends before and begins anew after, the output folders
   and the random state are set right.

For any other version of AppWorld all of this is off, with one warning: slower, but the engine's own behaviour.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

WRITTEN_FOR = "0.1.3.post1"

# The two kinds of in-memory databases that the engine makes for a task, by its own prefix for their paths.
_KINDS = (":memory:task_output", ":memory:task_input")
_base: dict[tuple[str, str], sqlite3.Connection] = {}


_adapted = False


def adapt() -> bool:
    """In the template, once, while no world is open. False, and a warning, for another version of AppWorld."""
    global _adapted
    import appworld

    _adapted = bool(appworld.__version__ == WRITTEN_FOR)
    if _adapted:
        _share_databases()
    else:
        sys.stderr.write(
            f"appworld: version {appworld.__version__} is not {WRITTEN_FOR}, which aioenv is tuned for:"
            " worlds will take more time and memory\n"
        )
    return _adapted


def make_world(**settings: Any) -> Any:
    """`AppWorld(**settings)`."""
    from appworld import AppWorld
    from appworld.task import Task

    if not _adapted:
        return AppWorld(**settings)
    with (
        # It wants the path of this collection, which itself is one more copy of all databases.
        patch.object(Task, "model_collection", property(_OnlyPath)),
        # In a fresh fork nothing is open, and closing would throw away the databases just made.
        patch.object(AppWorld, "close_all", lambda *args: None),
        patch.object(AppWorld, "_save_state", _nothing),
        patch.object(AppWorld, "save_logs", _nothing),
    ):
        world = AppWorld(**settings)
    world._save_state = world.save_logs = _nothing
    return world


class _OnlyPath:
    def __init__(self, task: Any) -> None:
        self.from_db_home_path = task.models_from_db_home_path


def _nothing(*args: Any) -> None:
    pass


def save(world: Any) -> None:
    """Write the databases' changes and the logs, as the engine does after each step."""
    cls = type(world)
    cls._save_state(world, world.output_db_home_path_on_disk)
    cls.save_logs(world)


def task_completed(world: Any) -> bool:
    """As `AppWorld.task_completed`, without the way through the API."""
    if not _adapted:
        return bool(world.task_completed())
    from appworld.apps.supervisor.models import SQLModel, Task

    # Plain SQL: the way through the ORM writes to 4 MiB of memory that the world shared until then.
    row = SQLModel.db.connection.execute(f"SELECT status FROM {Task.__tablename__} ORDER BY id LIMIT 1").fetchone()
    return row is not None and row[0] in ("success", "fail")


def rest(world: Any) -> None:
    """Before a fork: end the thread behind the world's API client, and keep the random state (a fork reseeds)."""
    requester = world.requester
    requester.client.__exit__(None, None, None)
    world.random_state = random.getstate()


def wake(world: Any, experiment_name: str) -> None:
    """After a fork: a client of its own, and in a copy output folders below the root of now."""
    from appworld.common.path_store import path_store
    from starlette.testclient import TestClient

    requester = world.requester
    requester.client = requester.clients[requester.apps] = TestClient(requester.client.app).__enter__()
    outputs = os.path.join(path_store.experiment_outputs, experiment_name)
    if outputs != world.base_output_directory:
        _move_outputs(world, experiment_name, outputs)
    random.setstate(world.random_state)


def _move_outputs(world: Any, experiment_name: str, outputs: str) -> None:
    """In a copy: its paths are below the root of the world that it is a copy of, which may be gone soon."""
    from appworld.apps import model_lib

    model_lib.get_db_home_path.cache_clear()
    world.models_from_db_home_path = model_lib.get_db_home_path("disk", "task_input", world.task_id)
    old, copied = world.base_output_directory, os.path.join(os.path.dirname(outputs), world.experiment_name)
    world.experiment_name, world.base_output_directory = experiment_name, outputs
    for name, value in vars(world).items():
        if isinstance(value, str) and value.startswith(old + os.sep):
            setattr(world, name, outputs + value.removeprefix(old))
    if os.path.isdir(copied):  # with the folder of a live world; that of a group's template is not copied
        os.rename(copied, outputs)
    else:
        world._prepare_directories()


def _share_databases() -> None:
    """Hold the base databases in memory, and let the engine take them from there."""
    from appworld.apps import get_all_apps, model_lib
    from appworld.common.path_store import path_store

    for app in get_all_apps():
        for kind in _KINDS:
            _base[kind, app] = _in_memory(Path(path_store.data) / "base_dbs" / f"{app}.db")
    original = model_lib.get_db_args

    def get_db_args(to_path: str, from_path: str | None = None) -> Any:
        key = to_path.partition("-")[0], Path(to_path).stem
        if from_path is None or not from_path.endswith(".jsonl") or key not in _base:
            return original(to_path, from_path)
        # Each is there once a process: a world makes its databases once, and so does its scoring.
        return _engine_over(_base.pop(key), to_path, from_path)

    model_lib.get_db_args = get_db_args


def _in_memory(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    source = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    source.backup(connection)
    source.close()
    return connection


def _engine_over(connection: sqlite3.Connection, to_path: str, changes: str) -> Any:
    """The SQLAlchemy engine and changes tracker that the engine's `get_db_args` would have made."""
    from appworld.apps import model_lib
    from sqlalchemy.pool import StaticPool
    from sqlmodel import create_engine

    url = f"sqlite:///file:{to_path.removeprefix(':memory:')}?mode=memory&cache=shared&uri=true"
    # The engine closes a database by disposing of its pool, which then connects once more, to something.
    connections = [connection]
    connect = lambda: connections.pop() if connections else sqlite3.connect(":memory:")  # noqa: E731
    sql_engine = create_engine(url, creator=connect, poolclass=StaticPool)
    tracker = model_lib.DBChangesTracker(sql_engine)
    tracker.restart()
    tracker.add_changes(model_lib.apply_db_changes(connection, changes))
    return sql_engine, tracker
