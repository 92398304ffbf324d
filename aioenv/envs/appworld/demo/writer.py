"""The files of one task, as AppWorld lays them out."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from aioenv.envs.appworld.demo.people import ACCOUNTS, CARD_NAMES
from aioenv.envs.appworld.demo.scenario import Plan, Scenario
from aioenv.envs.appworld.demo.world import World


def add_supervisor(world: World, plan: Plan, instruction: str) -> None:
    """Fill the supervisor app, from which the agent learns whom it works for, and the task itself."""
    person = plan.supervisor
    world.add(
        "supervisor.Supervisor",
        first_name=person.first,
        last_name=person.last,
        email=person.email,
        phone_number=person.phone,
        birthday=person.birthday,
        sex=person.sex,
    )
    owner = {"supervisor_id": 1}
    passwords = [{"account_name": app, "password": person.password(app), **owner} for app in ACCOUNTS]
    world.add_all("supervisor.AccountPassword", passwords)
    world.add_all("supervisor.Address", [{"name": n, **person.address(n), **owner} for n in ("Home", "Work")])
    world.add_all("supervisor.PaymentCard", [{**person.card(name), **owner} for name in CARD_NAMES])
    world.add("supervisor.Task", instruction=instruction, **owner)


def write_task(folder: Path, scenario: Scenario, plan: Plan, api_calls: int) -> None:
    """Everything of a task but its databases. `api_calls`: how many requests the gold solution makes."""
    from appworld.common.constants import CANARY_STRING, DB_VERSION

    person = plan.supervisor
    supervisor = {
        "first_name": person.first,
        "last_name": person.last,
        "email": person.email,
        "phone_number": person.phone,
    }
    specs = {
        "instruction": scenario.instruction_text(plan),
        "supervisor": supervisor,
        "datetime": plan.now.isoformat(),
        "db_version": DB_VERSION,
        "canary_string": CANARY_STRING,
    }
    write_json(folder / "specs.json", specs)
    truth = folder / "ground_truth"
    truth.mkdir()
    solution = scenario.solution_code(plan)
    write_json(truth / "metadata.json", _metadata(scenario, solution, api_calls))
    write_json(truth / "public_data.json", dict(plan.params))
    write_json(truth / "private_data.json", dict(plan.private))
    write_json(truth / "answer.json", plan.answer)
    write_json(truth / "required_apps.json", sorted(scenario.apps))
    write_json(truth / "test_data.json", scenario.test_data())
    write_text(truth / "evaluation.py", scenario.evaluation_code())
    write_text(truth / "solution.py", solution)
    write_text(truth / "compiled_solution.py", solution)


def _metadata(scenario: Scenario, solution: str, api_calls: int) -> dict[str, Any]:
    # Parsed and unparsed: no comments, one statement a line.
    body = ast.unparse(ast.parse(solution)).splitlines()[1:]
    return {
        "mode": "full",
        "difficulty": scenario.difficulty,
        "num_apps": len(scenario.apps),
        "num_apis": len(set(re.findall(r"apis\.(\w+\.\w+)", solution))),
        "num_api_calls": api_calls,
        "num_solution_code_lines": len(body),
    }


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=True) + "\n")


def write_text(path: Path, text: str) -> None:
    # Always UTF-8 and \n: the same bytes whatever the user's locale and platform.
    path.write_bytes(text.encode("utf-8"))
