"""What a scenario is: three variations of one task, how to solve them, and how to judge the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from random import Random
from string import Template
from textwrap import dedent, indent
from typing import Any, Literal

from aioenv.envs.appworld.demo.people import Person
from aioenv.envs.appworld.demo.world import World

TASKS_PER_SCENARIO = 3
Split = Literal["train", "dev", "test_normal", "test_challenge"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test_normal", "test_challenge")


@dataclass(frozen=True)
class Check:
    """One requirement of an evaluation.

    `label` says what it gives when the agent does nothing: "no_op_fail" or "no_op_pass". `body` is the code under
    `with test(...)`; it sees the arguments of AppWorld's `evaluate`, the helpers in `EVALUATION_HEAD`, and `params`,
    the plan's public and private values.
    """

    requirement: str
    label: Literal["no_op_fail", "no_op_pass"]
    body: str


@dataclass(frozen=True)
class Plan:
    """One task of a scenario: whose it is, when it happens, and the values that tell it from its siblings.

    `params` are the values that the instruction states (public data); they fill the `$name` places of the
    instruction as text and of the solution as literals. `private` is known to the evaluation only.
    """

    supervisor: Person
    now: datetime
    params: Mapping[str, Any]
    answer: Any = None
    private: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """`plan` is called with the databases of one task open, and adds to them what this task needs."""

    id: str
    split: Split
    difficulty: int
    apps: tuple[str, ...]
    instruction: str
    solution: str
    checks: tuple[Check, ...]
    plan: Callable[[World, int, Random], Plan]

    def instruction_text(self, plan: Plan) -> str:
        return Template(self.instruction).substitute(plan.params)

    def solution_code(self, plan: Plan) -> str:
        literals = {name: repr(value) for name, value in plan.params.items()}
        body = Template(dedent(self.solution).strip()).substitute(literals)
        return "def solution(apis, requester):\n" + indent(body, "    ") + "\n"

    def evaluation_code(self) -> str:
        blocks = [
            f'    with test(\n        """\n{indent(check.requirement, " " * 8)}\n        """\n    ):\n'
            + indent(dedent(check.body).strip(), " " * 8)
            for check in self.checks
        ]
        return EVALUATION_HEAD + "\n".join(blocks) + "\n"

    def test_data(self) -> list[dict[str, str]]:
        return [{"requirement": check.requirement, "label": check.label} for check in self.checks]


EVALUATION_HEAD = '''\
import json


def given_answer(models):
    return json.loads(models.end.supervisor.Task.first().answer)


def added(models, name, *fields):
    """Field values of the records that were added to a model, sorted."""
    return sorted([getattr(record, field) for field in fields] for record in models.changed_records(name)[0])


def edited(models, name):
    """Which fields of which records of a model were changed: {id: [field, ...]}."""
    ids = sorted(record.id for record in models.changed_records(name)[1])
    skip = ["record_hash", "updated_at"]
    return {id_: sorted(models.changed_field_names(name, id_, ignore=skip)) for id_ in ids}


def removed(models, name):
    return sorted(record.id for record in models.changed_records(name)[2])


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    params = {**public_data, **private_data}
'''


def answer_is(what: str) -> Check:
    body = "test.answer(given_answer(models), ground_truth_answer)"
    return Check(f"assert that the answer is {what}.", "no_op_fail", body)


def no_answer() -> Check:
    # An unanswered task holds a placeholder, not null: doing nothing fails this one.
    body = 'test.case(models.end.supervisor.Task.first().answer, "==", "null")'
    return Check("assert that the task was completed without an answer.", "no_op_fail", body)


def reported_success() -> Check:
    body = 'test.case(models.end.supervisor.Task.first().status, "==", "success")'
    return Check("assert that the task was reported as done with success.", "no_op_fail", body)


def only_changes(*models: str) -> Check:
    """Nothing but these models has changed; the engine leaves out the task itself and card balances."""
    what = "nothing but " + ", ".join(models) if models else "nothing at all"
    body = f'test.case(models.changed_model_names() - {set_literal(models)}, "==", set())'
    return Check(f"assert that {what} has changed.", "no_op_pass", body)


def set_literal(names: tuple[str, ...]) -> str:
    return "{" + ", ".join(f'"{name}"' for name in names) + "}" if names else "set()"


def keeps(model: str, *, but_adds: bool = False) -> Check:
    """No record of this model was edited or removed (nor added, unless `but_adds`)."""
    body = f'test.case([edited(models, "{model}"), removed(models, "{model}")], "==", [{{}}, []])'
    text = f"assert that no existing record of {model} was edited or removed"
    if not but_adds:
        body += f'\ntest.case(added(models, "{model}", "id"), "==", [])'
        text += ", and none was added"
    return Check(text + ".", "no_op_pass", body)


def only_edits(model: str, *fields: str) -> Check:
    """Records of this model were neither added nor removed, and only these fields edited."""
    body = f"""
    fields = {{field for changed in edited(models, "{model}").values() for field in changed}}
    test.case(fields - {set_literal(fields)}, "==", set())
    test.case([added(models, "{model}", "id"), removed(models, "{model}")], "==", [[], []])
    """
    text = f"assert that in {model} nothing but {', '.join(fields)} was edited, and no record was added or removed."
    return Check(text, "no_op_pass", body)


HEAD = """\
passwords = {row["account_name"]: row["password"] for row in apis.supervisor.show_account_passwords()}
profile = apis.supervisor.show_profile()
"""


def login(*apps: str) -> str:
    """First block of a gold solution: an access token per app, in a variable named like the app."""
    lines = []
    for app in apps:
        name = "phone_number" if app == "phone" else "email"
        call = f'apis.{app}.login(username=profile["{name}"], password=passwords["{app}"])'
        lines.append(f'{app} = {call}["access_token"]\n')
    return HEAD + "".join(lines) + "# --- step\n"


def paged(name: str, call: str, last: int | None = None) -> str:
    """Code that collects all pages of an API in the list `name`; `call` ends before its closing bracket.

    A search by query alone never runs dry (what does not match comes last): `last` bounds the number of pages.
    """
    more = f" and page < {last}" if last else ""
    return (
        f"{name}, page = [], 0\n"
        f"while (rows := {call}, page_index=page, page_limit=20)){more}:\n"
        f"    {name} += rows\n"
        "    page += 1\n"
    )
