"""The real AppWorld engine, on demo data, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Caller

from aioenv.envs.appworld.demo import gold_steps

SPLITS = ("train", "dev", "test_normal", "test_challenge")


def task_ids(root: Path, *splits: str) -> list[str]:
    return [line for split in splits for line in (root / f"data/datasets/{split}.txt").read_text().split()]


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


async def observe(call: Caller, instance_id: str, content: Any, **params: Any) -> str:
    return str((await call.say(instance_id, content, **params)).data["state"][0]["content"])


async def play(call: Caller, task_id: str, steps: list[str], **params: Any) -> dict[str, Any]:
    """A whole episode: its last step's reply, and both scores."""
    instance_id = await call.create(env_type="appworld", task_id=task_id)
    last: dict[str, Any] = {}
    for code in steps:
        last = (await call.say(instance_id, fenced(code), **params)).data
    dense = (await call.post("evaluate", instance_id=instance_id)).data
    sparse = (await call.post("evaluate", instance_id=instance_id, params={"sparse": True})).data
    assert (await call.post("release", instance_id=instance_id)).body["success"] is True
    return {"last": last, "dense": dense, "sparse": sparse}


def is_question(root: Path, task_id: str) -> bool:
    return json.loads((root / f"data/tasks/{task_id}/ground_truth/answer.json").read_text()) is not None


async def play_all(call: Caller, plans: list[tuple[str, list[str], bool]], at_once: int = 4) -> list[dict[str, Any]]:
    limit = asyncio.Semaphore(at_once)

    async def limited(task_id: str, steps: list[str], sparse: bool) -> dict[str, Any]:
        async with limit:
            return await play(call, task_id, steps, sparse=sparse)

    return await asyncio.gather(*(limited(*plan) for plan in plans))


async def test_every_gold_solution_scores_1_and_ends_the_episode_with_that_reward(
    appworld: Caller, demo_root: Path
) -> None:
    ids = task_ids(demo_root, *SPLITS)
    plans = [(task_id, gold_steps(demo_root, task_id), bool(number % 2)) for number, task_id in enumerate(ids)]
    for (task_id, steps, _), played in zip(plans, await play_all(appworld, plans), strict=True):
        assert (played["dense"], played["sparse"]) == (1.0, 1.0), task_id
        assert (played["last"]["reward"], played["last"]["is_terminated"]) == (1.0, True), task_id
        assert played["last"]["info"]["step"] == len(steps)


async def test_evaluating_in_the_middle_changes_nothing(appworld: Caller, demo_root: Path) -> None:
    """The engine's own scoring does: it leaves some apps at the databases of the start."""
    first_of_each = [task_id for task_id in task_ids(demo_root, *SPLITS) if task_id.endswith("_1")]
    for task_id in first_of_each:
        instance_id = await appworld.create(env_type="appworld", task_id=task_id)
        for code in gold_steps(demo_root, task_id):
            assert (await appworld.post("evaluate", instance_id=instance_id)).data < 1.0
            last = (await appworld.say(instance_id, fenced(code))).data
        assert (last["is_terminated"], last["reward"]) == (True, 1.0), task_id
        assert (await appworld.post("evaluate", instance_id=instance_id)).data == 1.0
        await appworld.post("release", instance_id=instance_id)


async def test_doing_nothing_scores_0_sparse_and_less_than_1_dense(appworld: Caller, demo_root: Path) -> None:
    ids = task_ids(demo_root, *SPLITS)
    for task_id, played in zip(ids, await play_all(appworld, [(task_id, [], False) for task_id in ids]), strict=True):
        assert played["sparse"] == 0.0, task_id
        assert 0.0 < played["dense"] < 1.0, task_id


async def test_a_wrong_answer_fails_and_the_last_reward_honours_sparse(appworld: Caller, demo_root: Path) -> None:
    questions = [task_id for task_id in task_ids(demo_root, "train") if is_question(demo_root, task_id)][:4]
    assert questions
    for task_id in questions:
        wrong = [*gold_steps(demo_root, task_id)[:-1], "apis.supervisor.complete_task(answer='no such answer')"]
        sparse = await play(appworld, task_id, wrong, sparse=True)
        assert (sparse["sparse"], sparse["last"]["reward"], sparse["last"]["is_terminated"]) == (0.0, 0.0, True)
        dense = await play(appworld, task_id, wrong)
        assert 0.0 < dense["last"]["reward"] == dense["dense"] < 1.0


async def test_giving_up_ends_the_episode(appworld: Caller, demo_root: Path) -> None:
    task_id = task_ids(demo_root, "train")[0]
    played = await play(appworld, task_id, ["apis.supervisor.complete_task(status='fail')"], sparse=True)
    assert (played["last"]["is_terminated"], played["last"]["reward"]) == (True, 0.0)


@pytest.fixture
async def world(appworld: Caller, demo_root: Path):
    instance_id = await appworld.create(env_type="appworld", task_id=task_ids(demo_root, "train")[0])
    yield instance_id
    await appworld.post("release", instance_id=instance_id)


@pytest.fixture
async def simple_world(appworld: Caller, demo_root: Path):
    body = {"task_id": task_ids(demo_root, "train")[0], "params": {"simple": True}}
    instance_id = await appworld.create(env_type="appworld", **body)
    yield instance_id
    await appworld.post("release", instance_id=instance_id)


async def test_variables_functions_and_imports_persist_across_steps(appworld: Caller, world: str) -> None:
    await observe(appworld, world, fenced("import math\nx = 20\ndef double(n):\n    return 2 * n"))
    assert await observe(appworld, world, fenced("print(double(x) + math.floor(2.5))")) == "Output:\n```\n42\n```"
    assert await observe(appworld, world, fenced("y = 1")) == "Output:\n```\nExecution successful.\n```"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(1", "Syntax error in line"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("undefined_name", "NameError"),
        ("apis.spotify.no_such_api()", "No API named 'no_such_api'"),
        ("apis.spotify.login()", "Response status code is 422"),
        ("raise KeyboardInterrupt('stop')", "KeyboardInterrupt: stop"),
        ("raise SystemExit(3)", "3"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("class E(Exception):\n    def __str__(self):\n        raise self\nraise E()", "E"),
        ("class E(BaseException):\n    def __str__(self):\n        raise self\nraise E()", "E"),
        ("def f():\n    f()\nf()", "RecursionError"),
        ("import asyncio\nraise asyncio.CancelledError", "not allowed: asyncio"),
    ],
)
async def test_the_agents_exception_is_an_observation(appworld: Caller, world: str, code: str, expected: str) -> None:
    observation = await observe(appworld, world, fenced(code))
    assert observation.startswith("Output:\n```\nExecution failed. Traceback:\n")
    assert expected in observation
    # And nothing is broken afterwards: the engine's guard lets go of what it patched.
    assert await observe(appworld, world, fenced("print(1 + 1)")) == "Output:\n```\n2\n```"
    score = (await appworld.post("evaluate", instance_id=world)).data
    assert 0.0 < score < 1.0


async def test_half_a_surrogate_pair_does_not_break_the_world(appworld: Caller, world: str) -> None:
    assert await observe(appworld, world, fenced("print('a\\ud800b')")) == "Output:\n```\na?b\n```"
    assert await observe(appworld, world, fenced("print('fine')")) == "Output:\n```\nfine\n```"


async def test_what_is_no_action_is_told_in_an_observation(appworld: Caller, world: str) -> None:
    for message, expected in [
        ({"content": "Let me think."}, "No code was found"),
        ({"content": "```bash\nls\n```"}, "No code was found"),
        ({"content": "```python\n\n```"}, "No code was found"),
        ({}, "No code was found"),
        ({"content": None}, "No code was found"),
        ({"content": 5}, "No code was found"),
        ({"tool_calls": [{"name": "bash", "arguments": "{}"}]}, "There is no tool 'bash'"),
        ({"tool_calls": [{"name": "appworld", "arguments": "{broken"}]}, "not valid JSON"),
        ({"tool_calls": [{"name": "appworld", "arguments": "{}"}]}, "must be"),
        ({"tool_calls": [{"name": "appworld", "arguments": '{"code": 5}'}]}, "must be"),
        ({"tool_calls": "appworld"}, "must be a list"),
    ]:
        reply = await appworld.post("step", instance_id=world, messages=message)
        assert expected in reply.data["state"][0]["content"]
        assert (reply.data["reward"], reply.data["is_terminated"]) == (0.0, False)


async def test_tool_calls_flat_and_nested_are_run(appworld: Caller, world: str) -> None:
    arguments = json.dumps({"code": "print(6 * 7)"})
    nested = {"id": "call_1", "type": "function", "function": {"name": "appworld", "arguments": arguments}}
    flat = {"name": "appworld", "arguments": arguments}
    for call in (nested, flat, {"name": "appworld", "arguments": {"code": "print(6 * 7)"}}):
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        reply = await appworld.post("step", instance_id=world, messages=message)
        assert reply.data["state"] == [{"role": "user", "content": "Output:\n```\n42\n```", "tool_calls": []}]
    two = await appworld.post("step", instance_id=world, messages={"content": "", "tool_calls": [flat, nested]})
    assert "Only the first of your 2 tool calls was run" in two.data["state"][0]["content"]


async def test_the_first_block_is_run_also_if_its_fence_is_never_closed(appworld: Caller, world: str) -> None:
    two = "Thinking.\n```python\nprint('first')\n```\nAnd then\n```python\nprint('second')\n```"
    assert await observe(appworld, world, two) == "Output:\n```\nfirst\n```"
    assert await observe(appworld, world, "Cut off: ```python\nprint('open')") == "Output:\n```\nopen\n```"


async def test_simple_mode_runs_bare_code_and_observes_raw(appworld: Caller, simple_world: str) -> None:
    assert await observe(appworld, simple_world, "x = 5\nprint(x)") == "5\n"
    assert await observe(appworld, simple_world, fenced("print(x + 1)")) == "6\n"
    assert "ZeroDivisionError" in await observe(appworld, simple_world, "1 / 0")


async def test_prompts_tell_who_asks_and_what_for(appworld: Caller, demo_root: Path) -> None:
    task_id = task_ids(demo_root, "train")[0]
    specs = json.loads((demo_root / f"data/tasks/{task_id}/specs.json").read_text())
    prompts = {}
    for name, params in [("full", {}), ("simple", {"simple": True}), ("bare", {"prompt": False})]:
        reply = await appworld.post("create", env_type="appworld", task_id=task_id, instance_id=name, params=params)
        system, user = reply.data["state"]
        assert (system["role"], user) == ("system", {"role": "user", "content": specs["instruction"]})
        prompts[name] = system["content"]
        for key in ("first_name", "last_name", "email", "phone_number"):
            assert specs["supervisor"][key] in system["content"]
        await appworld.post("release", instance_id=name)
    for api in ("show_app_descriptions", "show_api_descriptions", "show_api_doc"):
        assert api in prompts["full"]
        assert api in prompts["simple"]
    assert len(prompts["full"]) > len(prompts["simple"]) > len(prompts["bare"])
    assert prompts["full"].endswith(prompts["bare"])


async def test_get_info_describes_the_tool(appworld: Caller, world: str) -> None:
    info = (await appworld.post("get_info", instance_id=world)).data
    for api in ("show_app_descriptions", "show_api_descriptions", "show_api_doc"):
        assert api in info


async def test_task_lists_and_their_aliases(appworld: Caller, demo_root: Path) -> None:
    for split, real in [*zip(SPLITS, SPLITS, strict=True), ("val", "dev"), ("test", "test_normal")]:
        listed = (await appworld.post("get_env_profile", env_type="appworld", params={"split": split})).data
        assert listed == task_ids(demo_root, real)
    unknown = await appworld.post("get_env_profile", params={"split": "nope"})
    assert (unknown.status, unknown.error["code"]) == (400, "bad_request")
    assert all(split in unknown.error["message"] for split in SPLITS)


async def test_bad_creates_are_told_what_is_wrong(appworld: Caller, demo_root: Path) -> None:
    task_id = task_ids(demo_root, "train")[0]
    for task, params, status, expected in [
        ("nope_1", {}, 404, "/get_env_profile"),
        ("../../etc", {}, 404, "/get_env_profile"),
        (task_id, {"world": {"experiment_name": "mine"}}, 400, "max_interactions"),
        (task_id, {"world": {"nope": 1}}, 400, "max_interactions"),
        (task_id, {"world": {"timeout_seconds": "soon"}}, 400, "timeout_seconds"),
        (task_id, {"world": [1]}, 400, "object"),
        (task_id, {"simple": "yes"}, 400, "true or false"),
    ]:
        reply = await appworld.post("create", env_type="appworld", task_id=task, params=params)
        assert reply.status == status, reply
        assert expected in reply.error["message"]


async def test_world_settings_reach_the_engine(appworld: Caller, demo_root: Path) -> None:
    body = {"task_id": task_ids(demo_root, "train")[0], "params": {"world": {"max_interactions": 1}}}
    instance_id = await appworld.create("limited", **body)
    assert "1" in await observe(appworld, instance_id, fenced("print(1)"))
    assert "Maximum number of executions (1) reached" in await observe(appworld, instance_id, fenced("print(2)"))
    await appworld.post("release", instance_id=instance_id)


async def test_two_instances_of_one_task_do_not_see_each_other(appworld: Caller, demo_root: Path) -> None:
    task_id = task_ids(demo_root, "train")[0]
    one, two = [await appworld.create(name, task_id=task_id, params={"simple": True}) for name in ("one", "two")]
    login = (
        "passwords = {p['account_name']: p['password'] for p in apis.supervisor.show_account_passwords()}\n"
        "email = apis.supervisor.show_profile()['email']\n"
        "token = apis.simple_note.login(username=email, password=passwords['simple_note'])['access_token']\n"
    )
    count = "print(len(apis.simple_note.search_notes(query='zanzibar', access_token=token, page_limit=20)))"
    for instance_id in (one, two):
        await observe(appworld, instance_id, login)
    before = await observe(appworld, two, count)
    await observe(appworld, one, "secret = 1")
    await observe(
        appworld, one, "apis.simple_note.create_note(title='zanzibar', content='zanzibar', access_token=token)"
    )
    assert await observe(appworld, one, "print([n['title'] for n in apis.simple_note.search_notes("
                                        "query='zanzibar', access_token=token)][0])") == "zanzibar\n"  # fmt: skip
    assert await observe(appworld, two, count) == before
    assert "NameError" in await observe(appworld, two, "print(secret)")
    for instance_id in (one, two):
        await appworld.post("release", instance_id=instance_id)


async def test_24_episodes_at_once_on_8_worlds_of_3_tasks_reward_as_one_after_another(
    appworld: Caller, demo_root: Path
) -> None:
    plans = []
    for task_id in task_ids(demo_root, "train")[:3]:
        gold = gold_steps(demo_root, task_id)
        plans += [(task_id, steps) for steps in (gold, gold[:-1], [], [gold[0], gold[-1]])]
    plans = plans * 2
    assert len(plans) == 24
    one_by_one = [await play(appworld, *plan) for plan in plans[:12]] * 2
    at_once = await play_all(appworld, [(*plan, False) for plan in plans], at_once=8)
    assert [(p["dense"], p["sparse"]) for p in at_once] == [(p["dense"], p["sparse"]) for p in one_by_one]
    assert {p["sparse"] for p in at_once} == {0.0, 1.0}


def test_the_example_worker_plays_and_shows_a_table(appworld_url: str, demo_root: Path) -> None:
    example = Path(__file__).parent.parent / "examples/rollout.py"
    command = [sys.executable, str(example), "--url", appworld_url, "--root", str(demo_root)]
    options = ["--episodes", "4", "--concurrency", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "4 episodes, mean reward 1.00, 0 failed" in done.stdout
    assert "100%" in done.stderr
    bad = subprocess.run([*command, "--split", "nope"], capture_output=True, text=True, timeout=120)
    assert (bad.returncode, "Traceback" in bad.stderr) == (1, False)
    assert "no tasks in the split 'nope'" in bad.stderr
