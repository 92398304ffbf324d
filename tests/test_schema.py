"""The schema's guarantees. CI runs this file under pydantic 1.10 and under pydantic 2."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from aioenv.schema import ActionMessage, Message, Reward, Role, Sample, StateMessage, Step, ToolCall, Trajectory

NESTED = {"id": "c1", "type": "function", "function": {"name": "appworld", "arguments": '{"code": "x = 1"}'}}
CREATED = {
    "state": [{"role": "system", "content": "rules"}, {"role": "user", "content": "task"}],
    "reward": 0.0,
    "is_terminated": False,
    "info": {"instance_id": "i1", "task_id": "t1"},
}
STEPPED = {
    "state": [{"role": "user", "content": "Output: 1", "tool_calls": []}],
    "reward": 0.25,
    "is_terminated": False,
    "info": {"step": 1},
}


def test_roles_are_strings_as_the_wire_has_them() -> None:
    assert [str(role) for role in Role] == [
        "system",
        "user",
        "tool",
        "assistant",
        "context_assistant",
        "summary_assistant",
    ]
    assert json.dumps(Role.USER) == '"user"'


@pytest.mark.parametrize(
    "given",
    [
        NESTED,
        {"id": "c1", "name": "appworld", "arguments": '{"code": "x = 1"}'},
        {"id": "c1", "name": "appworld", "arguments": {"code": "x = 1"}},
        {"id": "c1", "function": {"name": "appworld", "arguments": {"code": "x = 1"}}, "index": 0, "unknown": []},
    ],
)
def test_a_tool_call_takes_each_known_form_and_gives_openai_s(given: dict[str, Any]) -> None:
    call = ToolCall(**given)
    assert call.simple_dict() == NESTED
    assert call.arguments_dict() == {"code": "x = 1"}
    assert ToolCall(**call.simple_dict()) == call


@pytest.mark.parametrize("given", [{"name": "f"}, {"name": "f", "arguments": None}, {"name": "f", "arguments": ""}])
def test_a_tool_call_without_arguments_has_none(given: dict[str, Any]) -> None:
    assert ToolCall(**given).arguments_dict() == {}


@pytest.mark.parametrize(("arguments", "why"), [('{"code": ', "not JSON"), ("[1]", "must be an object, not list")])
def test_broken_arguments_are_kept_as_they_are_and_fail_only_when_parsed(arguments: str, why: str) -> None:
    call = ToolCall(name="f", arguments=arguments)
    assert call.simple_dict()["function"]["arguments"] == arguments
    with pytest.raises(ValueError, match=why):
        call.arguments_dict()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "needs a name"),
        ({"function": {"arguments": "{}"}}, "needs a name"),
        ({"function": "f"}, "function must be an object, not str"),
        ({"name": 3}, "name"),
        ({"name": "f", "arguments": [1]}, "arguments must be JSON text or an object, not list"),
        ({"name": "f", "arguments": {"x": {1, 2}}}, "arguments have no JSON form"),
    ],
)
def test_a_bad_tool_call_is_a_value_error_that_says_what_is_wrong(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ToolCall(**given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"content": "no role"}, "role"),
        ({"role": "robot"}, "assistant"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "user", "content": ["part"]}, "content"),
        ({"role": "user", "tool_calls": "f()"}, "tool_calls"),
        ({"role": "user", "tool_calls": ["f()"]}, "tool_calls"),
        ({"role": "user", "metadata": 1}, "metadata"),
    ],
)
def test_a_bad_message_is_a_value_error_that_names_the_key(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Message(**given)


def test_a_message_goes_on_the_wire_with_what_is_set_and_no_more() -> None:
    assert Message(role="user", metadata={"a": 1}).simple_dict() == {"role": "user", "content": ""}
    full = Message(role=Role.TOOL, content="1", name="appworld", tool_call_id="c1", tool_calls=[NESTED])
    assert full.simple_dict() == {
        "role": "tool",
        "content": "1",
        "name": "appworld",
        "tool_calls": [NESTED],
        "tool_call_id": "c1",
    }
    assert type(full.simple_dict()["role"]) is str


def test_an_action_message_is_the_assistant_s_and_takes_openai_s_nulls_and_unknown_keys() -> None:
    action = ActionMessage(content=None, tool_calls=[NESTED], refusal=None, logprobs={"x": 1})
    assert action.simple_dict() == {"role": "assistant", "content": "", "tool_calls": [NESTED]}
    assert ActionMessage(content="hi", tool_calls=None).simple_dict() == {"role": "assistant", "content": "hi"}


def test_a_state_message_is_the_user_s_and_always_has_tool_calls() -> None:
    assert StateMessage(content="x").simple_dict() == {"role": "user", "content": "x", "tool_calls": []}
    assert StateMessage(tool_calls=[NESTED]).simple_dict()["tool_calls"] == [NESTED]


def test_two_messages_share_no_default() -> None:
    one, two = Message(role="user"), Message(role="user")
    one.tool_calls.append(ToolCall(name="f"))
    one.metadata["x"] = 1
    assert (two.tool_calls, two.metadata) == ([], {})


def test_a_trajectory_fills_up_from_replies() -> None:
    trajectory = Trajectory.start(CREATED, env_type="appworld")
    assert (trajectory.task_id, trajectory.instance_id, trajectory.env_type) == ("t1", "i1", "appworld")
    step = trajectory.add({"role": "assistant", "content": "x"}, STEPPED)
    assert isinstance(step, Step)
    assert (step.reward, step.info) == (0.25, {"step": 1})
    assert not trajectory.is_terminated
    trajectory.add(ActionMessage(content="y"), {**STEPPED, "is_terminated": True, "reward": 1})
    assert trajectory.is_terminated
    assert trajectory.reward == Reward(value=1.25)
    assert [message.content for message in trajectory.messages()] == [
        "rules",
        "task",
        "x",
        "Output: 1",
        "y",
        "Output: 1",
    ]


def test_a_trajectory_refuses_steps_after_its_end_and_bad_ones_and_stays_as_it_was() -> None:
    trajectory = Trajectory.start(CREATED)
    with pytest.raises(ValueError, match="reward"):
        trajectory.add({"content": "x"}, {**STEPPED, "reward": "much"})
    assert trajectory == Trajectory.start(CREATED)
    trajectory.add({"content": "x"}, {**STEPPED, "is_terminated": True})
    with pytest.raises(ValueError, match="ended after 1 steps"):
        trajectory.add({"content": "y"}, STEPPED)
    assert len(trajectory.steps) == 1


def test_trajectory_and_sample_survive_json() -> None:
    trajectory = Trajectory.start(CREATED)
    trajectory.add({"content": "x", "tool_calls": [NESTED]}, STEPPED)
    assert Trajectory(**json.loads(json.dumps(trajectory.to_dict()))) == trajectory
    sample = Sample.from_trajectory(trajectory)
    assert sample.task_id == "t1"
    assert sample.reward.value == 0.25
    assert sample.metadata == {"instance_id": "i1", "is_terminated": False}
    assert Sample(**json.loads(json.dumps(sample.to_dict()))).to_dict() == sample.to_dict()


def test_importing_the_schema_imports_nothing_heavy() -> None:
    code = (
        "import sys, aioenv.schema; "
        "bad = {'jinja2', 'aiohttp', 'aioenv.server', 'aioenv.pool', 'aioenv.envs', 'aioenv.client'}; "
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
