"""Demo data: a small AppWorld data root of our own invention, for tests, benches and first tries.

AppWorld's own data may not be published, and takes 190 MB to fetch. `build` makes a data root that the same engine
accepts, with invented people, catalogues and tasks:

    people.py, catalog.py    who lives in this world, and what can be bought and heard there
    engine.py                the engine's models, pointed at one set of databases at a time
    world.py, background.py  the base databases: accounts, friends, and everyday clutter
    filler.py                optional rows of strangers, to bring the databases to realistic size
    scenarios/               the tasks: instruction, data, gold solution, and how to judge the outcome
    writer.py, trial.py      one task's files; a trial run of its gold solution at build time
    gold.py                  the gold solution cut into steps

Importing this package imports nothing of appworld; only `build` does.
"""

from aioenv.envs.appworld.demo.build import build
from aioenv.envs.appworld.demo.gold import gold_steps

__all__ = ["build", "gold_steps"]
