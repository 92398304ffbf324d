"""Building a data root: base databases, API docs, tasks, dataset lists."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from aioenv.envs.appworld.demo.background import populate
from aioenv.envs.appworld.demo.engine import Engine
from aioenv.envs.appworld.demo.filler import add_filler
from aioenv.envs.appworld.demo.scenario import SPLITS, TASKS_PER_SCENARIO, Scenario
from aioenv.envs.appworld.demo.scenarios import SCENARIOS
from aioenv.envs.appworld.demo.trial import Trial
from aioenv.envs.appworld.demo.world import EPOCH, World
from aioenv.envs.appworld.demo.writer import add_supervisor, write_json, write_task, write_text


def build(root: Path, *, rows: int = 0, seed: int = 0, report: Callable[[str], None] | None = None) -> None:
    """Create `root/data`, a data root for AppWorld's engine with our own invented tasks.

    `rows` adds about that many rows of strangers' data to the base databases, in tables of all nine apps; no task
    is affected. AppWorld's own base databases hold about 370,000 rows. Equal `seed` and `rows` give files that are
    equal byte for byte. `report` is called with a line of text now and then.

    Call it in a fresh process of its own: it sets APPWORLD_ROOT, binds the engine's process-global models to its
    own databases and freezes the clock. The data appears under its final name only when it is complete; a build
    that dies leaves a `.data-*` folder, which may be deleted. Raises FileExistsError if `root/data` exists.
    """
    tell = report or (lambda line: None)
    root = Path(root).absolute()
    final = root / "data"
    if final.exists():
        raise FileExistsError(f"{final} exists already: delete it first, or build in another folder")
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f".data-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _build(temporary, rows, seed, tell)
        # rename() would silently replace an empty folder, but never one with content: the worst race is an error.
        (temporary / "data").rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    tell(f"demo data is ready in {final}")


def _build(root: Path, rows: int, seed: int, tell: Callable[[str], None]) -> None:
    # Before the import: the engine reads it while it loads.
    os.environ["APPWORLD_ROOT"] = os.fspath(root)
    from appworld.apps.api_lib import set_local_date_and_time, unset_local_date_and_time

    engine = Engine()
    gc.freeze()
    # The models' default dates come from the clock: frozen, or no two builds would be equal.
    freezer = set_local_date_and_time(EPOCH)
    try:
        _build_frozen(engine, root / "data", rows, seed, tell)
    finally:
        unset_local_date_and_time(freezer)
        engine.close()


def _build_frozen(engine: Engine, data: Path, rows: int, seed: int, tell: Callable[[str], None]) -> None:
    world = World(engine)
    base = data / "base_dbs"
    engine.open("base")
    populate(world, Random(f"base {seed}"))
    tell("people, catalogues and everyday data are in")
    _api_docs(engine, data / "api_docs" / "standard")
    tell("API docs are in")
    engine.save_full(base)
    engine.close()
    # Before the tasks: their changes name ids, which the engine draws anew when it replays them.
    added = add_filler(engine, base, rows, seed)
    if added:
        tell(f"added {added} rows of filler")
    trial = Trial(engine, engine.open("trial", base))
    # The engine's classes and apps stay for good; without this every full collection walks through them all.
    gc.freeze()
    try:
        for scenario in SCENARIOS:
            for number in range(1, TASKS_PER_SCENARIO + 1):
                _task(world, trial, data, scenario, number, Random(f"{scenario.id} {number} {seed}"))
            tell(f"scenario {scenario.id} is in")
    finally:
        trial.close()
    for split in SPLITS:
        ids = [
            f"{scenario.id}_{number}"
            for scenario in SCENARIOS
            if scenario.split == split
            for number in range(1, TASKS_PER_SCENARIO + 1)
        ]
        (data / "datasets").mkdir(exist_ok=True)
        write_text(data / "datasets" / f"{split}.txt", "\n".join(ids) + "\n")
    write_text(data / "version.txt", f"aioenv-demo-1 rows={rows} seed={seed}\n")


def _task(world: World, trial: Trial, data: Path, scenario: Scenario, number: int, rng: Random) -> None:
    engine = world.engine
    folder = data / "tasks" / f"{scenario.id}_{number}"
    engine.close()
    engine.open(folder.name, data / "base_dbs")
    plan = scenario.plan(world, number, rng)
    add_supervisor(world, plan, scenario.instruction_text(plan))
    engine.save_changes(folder / "dbs")
    calls = trial.run(scenario, plan)
    write_task(folder, scenario, plan, calls)


def _api_docs(engine: Engine, folder: Path) -> None:
    from appworld.api_docs import prepare_api_docs
    from appworld.apps import get_all_apps
    from appworld.common.constants import CANARY_STRING

    folder.mkdir(parents=True)
    fields = ("app_name", "api_name", "path", "method", "description", "parameters", "response_schemas")
    for app in get_all_apps(skip_admin=True):
        docs = prepare_api_docs(app, include_private_apis=False)
        write_json(folder / f"{app}.json", {doc["api_name"]: {**doc, "canary_string": CANARY_STRING} for doc in docs})
        rows = [{("app_name_" if name == "app_name" else name): doc[name] for name in fields} for doc in docs]
        model = engine.models["api_docs"].ApiDoc
        model.save_all([model(**row) for row in rows])
