"""A trial run of a gold solution at build time: it must work, and give the answer that the scenario expects."""

from __future__ import annotations

import json
from typing import Any

from aioenv.envs.appworld.demo.engine import Engine
from aioenv.envs.appworld.demo.scenario import Plan, Scenario


class Trial:
    """The engine's APIs, called directly: no world, no shell. One for all tasks, as it takes a while to set up."""

    def __init__(self, engine: Engine, home: str) -> None:
        """`home`: any databases that are open; each run works on those that are open then."""
        from appworld.collections.apis import ApiCollection

        self._engine = engine
        self._apis, self._requester = ApiCollection.load(
            to_db_home_path=home, from_db_home_path=home, load_apps=list(engine.apps)
        )

    def run(self, scenario: Scenario, plan: Plan) -> int:
        """Run the gold solution in the open databases, which it changes; returns how many API calls it made.

        Raises RuntimeError if it doesn't complete the task, or answers something else than planned. It is not
        scored here: that takes the task's files in their final place.
        """
        from appworld.apps.api_lib import set_local_date_and_time, set_local_random_seed, unset_local_date_and_time

        tracker = self._requester.request_tracker
        tracker.reset()
        scope: dict[str, Any] = {}
        exec(compile(scenario.solution_code(plan), f"{scenario.id}/solution.py", "exec"), scope)
        set_local_random_seed()
        freezer = set_local_date_and_time(plan.now)
        try:
            scope["solution"](self._apis, self._requester)
        finally:
            unset_local_date_and_time(freezer)
        task = self._engine.models["supervisor"].Task.first()
        answer = json.loads(task.answer)
        if task.status != "success" or answer != plan.answer:
            raise RuntimeError(f"{scenario.id}: the gold solution answered {answer!r}, expected {plan.answer!r}")
        return len(tracker.requests)

    def close(self) -> None:
        self._requester.close()
