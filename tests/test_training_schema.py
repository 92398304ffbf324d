"""The training side's schema. CI runs this file under pydantic 1.10 and under pydantic 2."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioenv.schema import Message
from aioenv.schema.training import (
    PromptTooLong,
    Reward,
    Sample,
    Task,
    TaskObjective,
    Trajectory,
    convert_tool_to_user_message,
)

KINDS = ("ids", "attention_mask", "position_ids", "loss_mask")
JOINED = {"ids": "input_ids"}
SHORT = st.integers(0, 12)


def parts(prompt: int, response: int) -> dict[str, list[int]]:
    """A sample's eight lists for a prompt and a response of these lengths; no two numbers are the same by chance."""
    lists = {}
    for place, kind in enumerate(KINDS):
        numbers = list(range(1000 * place, 1000 * place + prompt + response))
        lists[f"prompt_{kind}"] = numbers[:prompt]
        lists[f"response_{kind}"] = numbers[prompt:]
    return lists


def sample(prompt: int = 3, response: int = 4, **fields: Any) -> Sample:
    maxima = {"max_prompt_len": 10, "max_response_len": 10, "max_model_len": 20}
    return Sample(**{**parts(prompt, response), **maxima, **fields})


def assert_joined(made: Sample) -> None:
    """Every joined field is the prompt's followed by the response's, and all lists along one of these agree."""
    for kind in KINDS:
        prompt, response = getattr(made, f"prompt_{kind}"), getattr(made, f"response_{kind}")
        assert len(prompt) == len(made.prompt_ids)
        assert len(response) == len(made.response_ids)
        assert getattr(made, JOINED.get(kind, kind)) == prompt + response


# -- Sample: truncation ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(prompt=SHORT, response=SHORT, max_prompt=SHORT, max_response=SHORT, max_model=SHORT)
def test_truncation_cuts_the_response_to_the_maxima_and_nothing_else(
    prompt: int, response: int, max_prompt: int, max_response: int, max_model: int
) -> None:
    maxima = {"max_prompt_len": max_prompt, "max_response_len": max_response, "max_model_len": max_model}
    made = sample(prompt, response, messages=[{"role": "user", "content": "x"}], **maxima)
    before = made.to_dict()
    if prompt > min(max_prompt, max_model):
        with pytest.raises(PromptTooLong):
            made.truncate_output_ids()
        assert made.to_dict() == before
        return
    made.truncate_output_ids()
    assert_joined(made)
    assert len(made.response_ids) == min(response, max_response, max_model - prompt)
    given_parts = parts(prompt, response)
    for kind in KINDS:
        kept = getattr(made, f"response_{kind}")
        assert getattr(made, f"prompt_{kind}") == given_parts[f"prompt_{kind}"]
        assert kept == given_parts[f"response_{kind}"][: len(kept)]
    after = made.to_dict()
    lists = {*given_parts, *(JOINED.get(kind, kind) for kind in KINDS)}
    assert {name for name in after if after[name] != before[name]} <= lists
    made.truncate_output_ids()
    assert made.to_dict() == after


def test_a_prompt_over_its_maximum_names_the_setting_to_change() -> None:
    with pytest.raises(PromptTooLong, match=r"prompt_ids has 3 tokens, over max_prompt_len 2: .* data\.max_prompt_len"):
        sample(max_prompt_len=2).truncate_output_ids()
    with pytest.raises(PromptTooLong, match=r"over max_model_len 2: .* actor_rollout_ref\.rollout\.max_model_len"):
        sample(max_model_len=2).truncate_output_ids()
    assert issubclass(PromptTooLong, ValueError)
    assert issubclass(PromptTooLong, RuntimeError)


def test_truncation_leaves_the_lists_that_it_was_given_alone() -> None:
    lists = parts(3, 4)
    made = Sample(**lists, max_prompt_len=3, max_response_len=1, max_model_len=4)
    twin = copy.copy(made)
    made.truncate_output_ids()
    assert made.response_ids == [3]
    assert lists == parts(3, 4)
    assert twin.response_ids == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("response_loss_mask", [1], "response_loss_mask has 1 numbers, but response_ids has 4"),
        ("loss_mask", [1], "loss_mask has 1 numbers, but prompt_loss_mask has 3 and response_loss_mask has 4"),
        ("prompt_position_ids", (0, 1, 2), "prompt_position_ids must be a list of ints, not tuple"),
        ("attention_mask", None, "attention_mask must be a list of ints, not NoneType"),
    ],
)
def test_truncation_refuses_what_was_assigned_since_and_changes_nothing(name: str, value: Any, why: str) -> None:
    made = sample(max_response_len=1)
    setattr(made, name, value)
    before = copy.deepcopy(vars(made))
    with pytest.raises(ValueError, match=why):
        made.truncate_output_ids()
    assert vars(made) == before


# -- Sample: construction ----------------------------------------------------------------------------------------------


def test_a_sample_has_a_trainer_s_fields_and_the_joined_ones_are_built() -> None:
    assert list(sample(0, 0).to_dict()) == [
        "data_id",
        "task_id",
        "rollout_id",
        "minor_index_id",
        "messages",
        "extras",
        "input_ids",
        "prompt_ids",
        "response_ids",
        "attention_mask",
        "prompt_attention_mask",
        "response_attention_mask",
        "position_ids",
        "prompt_position_ids",
        "response_position_ids",
        "loss_mask",
        "prompt_loss_mask",
        "response_loss_mask",
        "reward_scores",
        "max_prompt_len",
        "max_response_len",
        "max_model_len",
    ]
    assert_joined(sample(3, 4))
    assert_joined(sample(3, 4, input_ids=None, loss_mask=list(range(3000, 3007))))
    bare = Sample(max_prompt_len=1, max_response_len=1, max_model_len=2, messages=None, reward_scores=None)
    assert (bare.data_id, bare.minor_index_id, bare.input_ids, bare.messages, bare.reward_scores) == ("", 0, [], [], {})
    bare.truncate_output_ids()
    assert bare.input_ids == []


@pytest.mark.parametrize(("part", "size"), [("prompt", 3), ("response", 4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [-1, 1])
def test_lengths_that_disagree_are_an_error_with_both_names_and_lengths(
    part: str, size: int, kind: str, more: int
) -> None:
    why = f"{part}_{kind} has {size + more} numbers, but {part}_ids has {size}"
    if kind == "ids":
        why = f"{part}_attention_mask has {size} numbers, but {part}_ids has {size + more}"
    with pytest.raises(ValueError, match=why):
        sample(3, 4, **{f"{part}_{kind}": [1] * (size + more)})
    joined = JOINED.get(kind, kind)
    why = f"{joined} has {7 + more} numbers, but prompt_{kind} has 3 and response_{kind} has 4"
    with pytest.raises(ValueError, match=why):
        sample(3, 4, **{joined: [1] * (7 + more)})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt_ids": (0, 1, 2)}, "prompt_ids must be a list of ints, not tuple"),
        ({"prompt_ids": "abc"}, "prompt_ids must be a list of ints, not str"),
        ({"prompt_ids": [0, 1.0, "2"]}, "prompt_ids must be a list of ints, but holds float, str"),
        ({"input_ids": [0.5] * 7}, "input_ids must be a list of ints, but holds float"),
        ({"max_prompt_len": -1}, "max_prompt_len must be a whole number of tokens, 0 or more, not -1"),
        ({"max_response_len": 1.5}, "max_response_len must be a whole number of tokens, 0 or more, not 1.5"),
        ({"max_model_len": True}, "max_model_len must be a whole number"),
        ({"max_model_len": None}, "max_model_len"),
        ({"data_id": 1.5}, "data_id"),
        ({"minor_index_id": "0"}, "minor_index_id"),
        ({"messages": ["hi"]}, "a message must be a dict, not str"),
        ({"messages": "hi"}, "messages"),
        ({"extras": 1}, "extras"),
    ],
)
def test_a_bad_sample_is_a_value_error_that_names_the_field(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sample(**fields)


def test_a_sample_takes_ids_as_ints_masks_as_bools_and_messages_as_models() -> None:
    said = Message(role="assistant", content="x", metadata={"not": "sent"})
    made = sample(1, 1, data_id=3, task_id="t", rollout_id=0, prompt_loss_mask=[False], messages=[said], unknown=1)
    assert (made.data_id, made.task_id, made.rollout_id) == ("3", "t", "0")
    assert json.dumps(made.prompt_loss_mask + made.loss_mask[:1]) == "[0, 0]"
    assert made.messages == [{"role": "assistant", "content": "x"}]


# -- Reward and Trajectory ---------------------------------------------------------------------------------------------


def test_a_reward_s_defaults_and_its_success() -> None:
    assert Reward().to_dict() == {
        "outcome": 0.0,
        "success_rate": 0.0,
        "madness": 0.0,
        "description": "The outcome is 1 for a success and 0 for a failure.",
        "metadata": {},
    }
    assert [Reward(outcome=outcome).success for outcome in (-1, 0, 0.25, 1)] == [False, False, True, True]
    assert not Reward(success_rate=1.0).success


@pytest.mark.parametrize("name", ["outcome", "success_rate", "madness"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "much", None])
def test_a_reward_that_is_no_finite_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Reward(**{name: value})


def test_a_trajectory_s_defaults_and_its_success() -> None:
    assert Trajectory().to_dict() == {
        "data_id": "",
        "rollout_id": "",
        "steps": [],
        "query": "",
        "is_terminated": False,
        "metadata": {},
        "reward": None,
    }
    assert not Trajectory().success
    assert not Trajectory(reward=Reward()).success
    assert Trajectory(reward={"outcome": 0.5}).success


def test_a_trajectory_refuses_a_step_or_a_reward_that_is_none() -> None:
    with pytest.raises(ValueError, match="a message must be a dict, not str"):
        Trajectory(steps="hello")
    with pytest.raises(ValueError, match="outcome"):
        Trajectory(reward={"outcome": "much"})
    with pytest.raises(TypeError, match="set"):
        Trajectory(metadata={"x": {1}}).to_dict()


def test_a_context_manager_can_be_a_trajectory() -> None:
    class Context(Trajectory):
        def __init__(self) -> None:
            super().__init__()
            self.full_context = ["a"]

        @property
        def steps(self) -> list[dict[str, Any]]:
            return [{"role": "user", "content": content} for content in self.full_context]

    context = Context()
    context.reward = Reward(outcome=1)
    context.metadata["x"] = 1
    twin = context.copy()
    twin.full_context.append("b")
    assert [step["content"] for step in context.steps] == ["a"]
    assert [step["content"] for step in twin.steps] == ["a", "b"]
    assert context.success
    assert Trajectory(**context.to_dict()).to_dict() == context.to_dict()


# -- Task and TaskObjective --------------------------------------------------------------------------------------------


def test_a_task_s_defaults() -> None:
    assert Task(task_id="t").to_dict() == {
        "task_id": "t",
        "env_type": "appworld",
        "open_query": False,
        "metadata": {},
        "query": None,
        "ground_truth": None,
        "evaluator": "env",
    }
    for bad in ({}, {"task_id": 1}, {"task_id": "t", "query": ["q"]}, {"task_id": "t", "metadata": "m"}):
        with pytest.raises(ValueError, match=list(bad)[-1] if bad else "task_id"):
            Task(**bad)


def test_an_objective_reads_its_task_and_sets_its_ground_truth() -> None:
    task = Task(task_id="t", query="q", metadata={"x": 1})
    objective = TaskObjective(task=task, confidence=0.5)
    assert (objective.objective, objective.ground_truth, objective.reward) == ("q", None, None)
    objective.ground_truth = "solution"
    objective.task.metadata["y"] = 2
    objective.confidence = 1.0
    assert objective.to_dict() == {
        "task": {**task.to_dict(), "ground_truth": "solution", "metadata": {"x": 1, "y": 2}},
        "confidence": 1.0,
        "reward": None,
    }
    assert (task.ground_truth, task.metadata) == (None, {"x": 1})
    with pytest.raises(ValueError, match="nothing"):
        objective.nothing = 1


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize(("own", "kept"), [(None, "beside"), ("own", "own")])
def test_a_ground_truth_beside_the_task_fills_in_for_a_missing_one(as_dict: bool, own: str | None, kept: str) -> None:
    task = Task(task_id="t", ground_truth=own)
    assert TaskObjective(task=task.to_dict() if as_dict else task, ground_truth="beside").ground_truth == kept
    assert task.ground_truth == own


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "task"),
        ({"task": None}, "task"),
        ({"task": "t"}, "task"),
        ({"task": {}}, "task_id"),
        ({"task": {"task_id": "t"}, "ground_truth": 3}, "ground_truth must be a text, not int"),
        ({"task": {"task_id": "t"}, "confidence": "high"}, "confidence"),
        ({"task": {"task_id": "t"}, "reward": float("nan")}, "reward"),
    ],
)
def test_a_bad_objective_is_a_value_error_that_names_the_field(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TaskObjective(**fields)


# -- all of them -------------------------------------------------------------------------------------------------------


def one_of_each() -> list[Any]:
    task = Task(task_id="t", metadata={"x": [1]}, ground_truth="g")
    reward = Reward(outcome=0.5, metadata={"x": [1]})
    steps = [{"role": "user", "content": "x"}]
    return [
        task,
        TaskObjective(task=task, reward=0.25),
        reward,
        Trajectory(data_id="1", steps=steps, reward=reward, metadata={"x": [1]}),
        sample(data_id="1", messages=steps, extras={"x": [1]}, reward_scores=reward.to_dict()),
    ]


@pytest.mark.parametrize("made", one_of_each(), ids=lambda made: type(made).__name__)
def test_each_survives_json(made: Any) -> None:
    again = type(made)(**json.loads(json.dumps(made.to_dict())))
    assert again.to_dict() == made.to_dict()
    assert isinstance(made, Trajectory) or again == made


@pytest.mark.parametrize("made", one_of_each(), ids=lambda made: type(made).__name__)
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda made: made.copy(), lambda made: made.copy(deep=True)])
def test_no_copy_shares_a_list_or_a_dict(made: Any, how: Any) -> None:
    with warnings.catch_warnings():  # pydantic 2 calls a model's `copy` old
        warnings.simplefilter("ignore", DeprecationWarning)
        twin = how(made)
    assert type(twin) is type(made)
    assert twin.to_dict() == made.to_dict()
    for name, value in vars(made).items():
        assert getattr(twin, name) is not value or not isinstance(value, list | dict | Reward | Task), name


def test_only_a_deep_copy_has_its_own_insides() -> None:
    made = Trajectory(steps=[{"role": "user", "content": "x"}])
    assert made.copy().steps[0] is made.steps[0]
    assert made.copy(deep=True).steps[0] is not made.steps[0]


def test_two_of_a_kind_share_no_default() -> None:
    for make in (lambda: Task(task_id="t"), Reward, Trajectory, lambda: sample(0, 0)):
        one, two = make(), make()
        for name, value in vars(one).items():
            assert getattr(two, name) is not value or not isinstance(value, list | dict), name


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, aioenv.schema.training; "
        "bad = {'torch', 'transformers', 'numpy', 'aiohttp', 'aioenv.server', 'aioenv.pool', 'aioenv.client'}; "
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# -- convert_tool_to_user_message --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"tool_calls": [{"name": "f", "result": "one"}]}, "one"),
        ({"tool_calls": [{"result": "one"}, {"result": 2}, {"result": None}, {}, {"result": ""}]}, "one\n2\n"),
        ({"tool_calls": [{"result": "one"}], "content": "ignored"}, "one"),
        ({"tool_calls": [{"result": None}], "content": "own"}, "own"),
        ({"tool_calls": [], "content": "own", "tool_call_id": "c1"}, "own"),
        ({"tool_calls": None, "content": {"cost": 1}}, "{'cost': 1}"),
        ({"content": None}, ""),
        ({}, ""),
    ],
)
def test_a_tool_s_reply_becomes_the_user_s(message: dict[str, Any], content: str) -> None:
    reply = {"role": "tool", **message}
    before = copy.deepcopy(reply)
    assert convert_tool_to_user_message(reply) == {"role": "user", "content": content}
    assert reply == before


@settings(deadline=None)
@given(st.lists(st.text(), min_size=1))
def test_several_results_are_joined_in_order_a_line_for_each(results: list[str]) -> None:
    reply = {"role": "tool", "tool_calls": [{"result": result} for result in results]}
    assert convert_tool_to_user_message(reply)["content"] == "\n".join(results)


@pytest.mark.parametrize("role", ["user", "assistant", "system", "summary_assistant", None])
def test_any_other_message_is_returned_as_it_is(role: str | None) -> None:
    message = {"role": role, "content": "x", "tool_calls": [{"result": "one"}]}
    assert convert_tool_to_user_message(message) is message


def test_both_known_ways_to_call_it_work_and_an_unknown_format_does_not() -> None:
    reply = {"role": "tool", "content": "x"}
    tokenizer = object()
    wanted = {"role": "user", "content": "x"}
    assert convert_tool_to_user_message(reply, tokenizer, format="qwen") == wanted
    assert convert_tool_to_user_message(reply, format="qwen") == wanted
    assert convert_tool_to_user_message(reply, "qwen") == wanted
    with pytest.raises(ValueError, match="must be 'qwen', not 'llama'"):
        convert_tool_to_user_message(reply, format="llama")
    with pytest.raises(ValueError, match="must be 'qwen', not 'llama'"):
        convert_tool_to_user_message(reply, "llama")
