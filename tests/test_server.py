"""The protocol over real HTTP: its routes, and every row of its failure table."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from conftest import Server, served


async def test_an_episode_from_create_to_release(echo: Server) -> None:
    call = echo.call
    created = (await call.post("create", env_type="echo", task_id="train-1")).data
    instance_id = created["info"]["instance_id"]
    assert [message["role"] for message in created["state"]] == ["system", "user"]
    assert created["info"]["task_id"] == "train-1"
    assert (created["reward"], created["is_terminated"]) == (0.0, False)
    for number, said in enumerate(["hello", "done"], start=1):
        assert (await call.say(instance_id, said)).data == {
            "state": [{"role": "user", "content": said, "tool_calls": []}],
            "reward": float(said == "done"),
            "is_terminated": said == "done",
            "info": {"instance_id": instance_id, "task_id": "train-1", "step": number},
        }
    assert (await call.post("evaluate", instance_id=instance_id)).data == 1.0
    assert "done" in (await call.post("get_info", instance_id=instance_id)).data
    assert (await call.post("release", instance_id=instance_id)).body == {"success": True, "data": None}
    assert (await call.post("release", instance_id=instance_id)).body == {"success": False, "data": None}


async def test_old_clients_keys_are_understood(echo: Server) -> None:
    """As AgentEvolver's client sends them: all keys always, `env_type` "default" where it does not matter."""
    call = echo.call
    created = await call.post("create", env_type="echo", task_id="1", instance_id=None, messages={}, params={})
    instance_id = created.data["info"]["instance_id"]
    rest = {"env_type": "default", "task_id": None, "params": None, "unheard_of": 1}
    message = {"role": "assistant", "content": "x"}
    assert (await call.post("step", instance_id=instance_id, messages=message, **rest)).status == 200
    assert (await call.post("evaluate", instance_id=instance_id, messages=None, **rest)).data == 0.0
    assert (await call.post("release", instance_id=instance_id, messages={}, **rest)).body["success"] is True


async def test_a_null_env_is_the_first_one_of_the_server(echo: Server) -> None:
    assert (await echo.call.post("get_env_profile", env_type=None)).data[0] == "train-1"
    assert (await echo.call.post("get_env_profile", params={"split": "dev"})).data[0] == "dev-1"
    assert (await echo.call.post("release", instance_id=await echo.call.create())).body["success"] is True


async def test_a_create_is_idempotent_by_instance_id(echo: Server) -> None:
    body = {"env_type": "echo", "task_id": "t", "instance_id": "mine", "params": {"a": 1}}
    replies = await asyncio.gather(*(echo.call.post("create", **body) for _ in range(5)))
    await echo.call.say("mine", "hello")
    replies.append(await echo.call.post("create", **body))
    assert all(reply.data == replies[0].data for reply in replies)
    assert [line["steps"] for line in (await echo.call.get("instances")).body] == [1]


async def test_a_released_id_can_be_used_again_at_once(echo: Server) -> None:
    call = echo.call
    await call.create("again")
    releasing = asyncio.create_task(call.post("release", instance_id="again"))
    await asyncio.sleep(0)
    await releasing
    await call.create("again", params={"another": True})
    assert (await call.say("again", "x")).data["info"]["step"] == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"no json", "the body is not JSON"),
        (b"", "the body is not JSON"),
        (b"[1]", "the body must be a JSON object, not a list"),
        (b'{"instance_id": 5}', '"instance_id" must be a string or null, not a number'),
        (b'{"instance_id": "a", "messages": "hi"}', '"messages" must be an object or null, not a string'),
        (b'{"instance_id": "a", "params": [1]}', '"params" must be an object or null, not a list'),
        (b'{"instance_id": "a", "task_id": {}}', '"task_id" must be a string or null, not an object'),
        (b'{"instance_id": "a", "request_id": true}', '"request_id" must be a string or null, not a boolean'),
        (b"{}", '"instance_id" is missing'),
        (b'{"instance_id": "../../etc"}', '"instance_id" must have 1 to 128'),
        (b'{"instance_id": ".hidden"}', '"instance_id" must have 1 to 128'),
        (b'{"instance_id": ""}', '"instance_id" must have 1 to 128'),
        (b'{"instance_id": "' + b"x" * 129 + b'"}', '"instance_id" must have 1 to 128'),
        (b'{"instance_id": "a\\n"}', '"instance_id" must have 1 to 128'),
    ],
)
async def test_400_names_the_key_and_the_type(echo: Server, body: bytes, message: str) -> None:
    reply = await echo.call.post("step", raw=body)
    assert (reply.status, reply.error["code"], reply.error["retryable"]) == (400, "bad_request", False)
    assert message in reply.error["message"]


async def test_400_for_what_is_nested_too_deeply_to_be_passed_on(echo: Server) -> None:
    await echo.call.create("mine")
    for depth in (400, 2000):
        deep = b"[" * depth + b"]" * depth
        reply = await echo.call.post("step", raw=b'{"instance_id": "mine", "messages": {"content": ' + deep + b"}}")
        assert (reply.status, reply.error["code"]) == (400, "bad_request")
    assert (await echo.call.say("mine", "still here")).status == 200


async def test_400_for_a_body_that_is_not_what_its_headers_say(echo: Server) -> None:
    for encoding in ("gzip", "deflate"):
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        async with echo.call.session.post(f"{echo.call.url}/step", data=b"not packed", headers=headers) as response:
            assert response.status == 400, encoding
            assert (await response.json())["error"]["code"] == "bad_request"


async def test_bodies_cut_off_by_a_client_that_goes_away_do_no_harm(
    echo: Server, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = echo.call.url.removeprefix("http://").split(":")
    for _ in range(20):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /step HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
    await asyncio.sleep(0.2)
    assert (await echo.call.get("healthz")).body == "OK"
    assert "Traceback" not in caplog.text


async def test_400_for_a_create_without_a_task(echo: Server) -> None:
    reply = await echo.call.post("create", env_type="echo")
    assert (reply.status, reply.error["message"]) == (400, '"task_id" is missing')


async def test_400_for_a_split_that_does_not_exist(echo: Server) -> None:
    for split in ("nope", 5):
        assert (await echo.call.post("get_env_profile", params={"split": split})).status == 400


async def test_404_says_what_there_is(echo: Server) -> None:
    unknown_env = await echo.call.post("create", env_type="nope", task_id="t")
    assert (unknown_env.status, unknown_env.error["code"]) == (404, "unknown_env")
    assert "echo" in unknown_env.error["message"]
    assert (await echo.call.post("get_env_profile", env_type="nope")).error["code"] == "unknown_env"
    for route in ("step", "evaluate", "get_info"):
        unknown = await echo.call.post(route, instance_id="nope")
        assert (unknown.status, unknown.error["code"]) == (404, "unknown_instance")
        assert "GET /instances" in unknown.error["message"]


async def test_404_and_405_for_wrong_routes_are_json_too(echo: Server) -> None:
    assert (await echo.call.post("nope")).status == 404
    wrong = await echo.call.get("step")
    assert (wrong.status, wrong.error["code"]) == (405, "bad_request")


async def test_409_for_an_id_in_use_for_something_else(echo: Server) -> None:
    await echo.call.create("mine", env_type="echo", task_id="t", params={"a": 1})
    for other in (
        {"task_id": "x", "params": {"a": 1}},
        *({"task_id": "t", "params": {"a": v}} for v in (2, 1.0, True)),
    ):
        reply = await echo.call.post("create", **{"env_type": "echo", "task_id": "t", "instance_id": "mine", **other})
        assert (reply.status, reply.error["code"]) == (409, "instance_conflict")
        assert reply.error["instance_gone"] is False


async def test_410_says_why_it_is_gone(echo: Server) -> None:
    await echo.call.create("mine")
    await echo.call.post("release", instance_id="mine")
    for route in ("step", "evaluate", "get_info"):
        reply = await echo.call.post(route, instance_id="mine")
        assert (reply.status, reply.error["code"]) == (410, "instance_gone")
        assert reply.error["message"] == "instance mine is gone: released"
        assert (reply.error["instance_gone"], reply.error["retryable"]) == (True, False)


async def test_413_for_a_body_over_the_limit_and_large_ones_below_it_pass(tmp_path: Path) -> None:
    async with served("echo", limits={"max_body": 3 * 2**20}) as server:
        instance_id = await server.call.create()
        large = "x" * (2 * 2**20)
        assert (await server.call.say(instance_id, large)).data["state"][0]["content"] == large
        reply = await server.call.say(instance_id, large * 2)
        assert (reply.status, reply.error["code"]) == (413, "too_large")


async def test_the_default_limit_lets_64_mib_pass(echo: Server) -> None:
    instance_id = await echo.call.create()
    body = {"instance_id": instance_id, "messages": {"content": "x"}}
    padded = orjson.dumps(body)
    padded += b" " * (64 * 2**20 - len(padded))
    assert (await echo.call.post("step", raw=padded)).status == 200
    assert (await echo.call.post("step", raw=padded + b" ")).status == 413


async def test_500_has_the_envs_traceback_and_the_instance_lives_on() -> None:
    async with served("odd") as server:
        instance_id = await server.call.create()
        for kind in ("Exception", "SystemExit", "KeyboardInterrupt"):
            reply = await server.call.say(instance_id, f"raise {kind}")
            assert (reply.status, reply.error["code"]) == (500, "env_error")
            assert reply.error["instance_gone"] is False
            assert "odd_env.py" in reply.error["message"]
            assert f"{kind}: on demand" in reply.error["message"]
        assert (await server.call.say(instance_id, "history")).data["state"][0][
            "content"
        ] == "raise raise raise history"


@pytest.mark.parametrize("what", ["nan", "set", "two", "text", "none", "yes", "deep", "loop"])
async def test_500_where_the_env_returns_what_is_no_observation(what: str) -> None:
    async with served("odd") as server:
        instance_id = await server.call.create()
        reply = await server.call.say(instance_id, f"return {what}")
        assert (reply.status, reply.error["code"]) == (500, "env_error")
        assert (await server.call.say(instance_id, "history")).data["info"]["step"] == 2


async def test_500_for_a_score_that_is_no_number() -> None:
    async with served("odd") as server:
        instance_id = await server.call.create()
        assert (await server.call.post("evaluate", instance_id=instance_id)).error["code"] == "env_error"
        assert (await server.call.post("evaluate", instance_id=instance_id, params={"score": 0.5})).data == 0.5


async def test_half_a_surrogate_pair_in_an_observation_is_replaced() -> None:
    async with served("odd") as server:
        reply = await server.call.say(await server.call.create(), "surrogate")
        assert reply.data["state"][0]["content"] == "half ? a pair"


@pytest.mark.parametrize("task", ["raise", "die", "shapeless"])
async def test_a_create_that_fails_leaves_nothing(task: str) -> None:
    async with served("odd") as server:
        reply = await server.call.post("create", task_id=task, instance_id="mine")
        assert (reply.status, reply.error["code"]) == (500, "env_error")
        assert (await server.call.get("instances")).body == []
        assert list((server.pool.scratch / "worlds").iterdir()) == []
        assert (await server.call.post("step", instance_id="mine")).status == 404


async def test_an_env_can_answer_404_and_400_to_a_create() -> None:
    async with served("odd") as server:
        unknown = await server.call.post("create", task_id="missing")
        assert (unknown.status, unknown.error["code"]) == (404, "unknown_task")
        bad = await server.call.post("create", task_id="t", params={"bad": True})
        assert (bad.status, bad.error["message"]) == (400, '"params.bad" is bad')


async def test_503_at_capacity_until_one_is_released() -> None:
    async with served("echo", limits={"max_instances": 2, "create_queue": 0}) as server:
        call = server.call
        assert (await call.get("readyz")).status == 200
        await call.create("one")
        await call.create("two")
        reply = await call.post("create", task_id="t", instance_id="three")
        assert (reply.status, reply.error["code"], reply.error["retryable"]) == (503, "at_capacity", True)
        assert int(reply.headers["Retry-After"]) > 0
        readiness = await call.get("readyz")
        assert (readiness.status, readiness.body["instances"], readiness.body["limit"]) == (503, 2, 2)
        assert "the limit" in readiness.body["reason"]
        await call.post("create", task_id="t", instance_id="one")  # that one is there already
        await call.post("release", instance_id="one")
        await call.create("three")


async def test_504_for_a_step_over_its_limit_whatever_it_does() -> None:
    async with served("odd", limits={"step_timeout": 0.5}) as server:
        await server.call.create("sleeps")
        await server.call.create("blocks")
        await server.call.create("bystander")
        slow = asyncio.create_task(server.call.say("sleeps", "sleep 1000"))
        reply = await server.call.say("blocks", "block")
        for name, answer in (("blocks", reply), ("sleeps", await slow)):
            assert (answer.status, answer.error["code"], answer.error["retryable"]) == (504, "step_timeout", False)
            assert answer.error["instance_gone"] is True
            later = await server.call.say(name, "history")
            assert later.status == 410
            assert later.error["message"] == f"instance {name} is gone: step passed its 0.5 s limit"
        assert (await server.call.say("bystander", "history")).status == 200


async def test_504_for_a_create_and_an_evaluate_over_their_limits() -> None:
    async with served("odd", limits={"create_timeout": 1.0, "evaluate_timeout": 0.5}) as server:
        reply = await server.call.post("create", task_id="hang", instance_id="mine")
        assert (reply.status, reply.error["code"]) == (504, "step_timeout")
        assert (await server.call.get("instances")).body == []
        await server.call.create("other")
        reply = await server.call.post("evaluate", instance_id="other", params={"hang": True})
        assert reply.error["message"] == "evaluate passed its 0.5 s limit; instance other was killed"


async def test_healthz_and_instances(echo: Server) -> None:
    health = await echo.call.get("healthz")
    assert (health.status, health.body) == (200, "OK")
    await echo.call.create("mine", task_id="t7")
    await echo.call.say("mine", "x")
    (line,) = (await echo.call.get("instances")).body
    assert {key: line[key] for key in ("instance_id", "env", "task_id", "state", "steps", "call")} == {
        "instance_id": "mine",
        "env": "echo",
        "task_id": "t7",
        "state": "ready",
        "steps": 1,
        "call": None,
    }
    assert line["memory"] > 0
    assert line["age"] >= line["idle"] >= 0


async def test_a_call_that_comes_while_the_instance_starts_waits_for_it() -> None:
    async with served("odd") as server:
        creating = asyncio.create_task(server.call.create("mine", params={"sleep": 0.5}))
        while not (await server.call.get("instances")).body:
            await asyncio.sleep(0.01)
        step = asyncio.create_task(server.call.say("mine", "history"))
        release = asyncio.create_task(server.call.post("release", instance_id="mine"))
        await creating
        assert (await step).data["info"]["step"] == 1
        assert (await release).body["success"] is True


async def test_large_documents_do_not_stop_the_collector(echo: Server) -> None:
    import gc

    await echo.call.create("mine")
    await echo.call.say("mine", [[]] * 200_000)
    assert gc.isenabled()


async def test_calls_on_one_instance_run_one_at_a_time_in_their_order() -> None:
    async with served("odd") as server:
        await server.call.create("mine")
        sent = []
        for word in ["sleep 0.3", "history", "sleep 0.01", "history"]:
            sent.append(asyncio.create_task(server.call.say("mine", word)))
            await asyncio.sleep(0.05)
        replies = await asyncio.gather(*sent)
        assert [reply.data["info"]["step"] for reply in replies] == [1, 2, 3, 4]
        assert replies[3].data["state"][0]["content"] == "sleep history sleep history"


async def test_a_release_waits_for_the_calls_before_it() -> None:
    async with served("odd") as server:
        await server.call.create("mine")
        step = asyncio.create_task(server.call.say("mine", "sleep 0.3"))
        await asyncio.sleep(0.1)
        release = asyncio.create_task(server.call.post("release", instance_id="mine"))
        await asyncio.sleep(0.05)
        late = await server.call.say("mine", "history")
        assert (await step).data["state"][0]["content"] == "slept"
        assert (await release).body["success"] is True
        assert late.status == 410


async def test_one_slow_instance_does_not_hold_up_the_others() -> None:
    async with served("odd") as server:
        await server.call.create("slow")
        await server.call.create("quick")
        slow = asyncio.create_task(server.call.say("slow", "sleep 2"))
        for _ in range(20):
            assert (await server.call.say("quick", "history")).status == 200
        assert not slow.done()
        await slow


async def test_a_client_that_hangs_up_does_not_disturb_its_instance() -> None:
    async with served("odd") as server:
        await server.call.create("mine")
        hanging = asyncio.create_task(server.call.say("mine", "sleep 0.3"))
        await asyncio.sleep(0.1)
        hanging.cancel()
        reply = await server.call.say("mine", "history")
        assert reply.data["state"][0]["content"] == "sleep history"
        assert reply.data["info"]["step"] == 2


async def test_task_lists_run_in_a_job_process_and_its_death_is_told() -> None:
    async with served("odd") as server:
        first = (await server.call.post("get_env_profile", env_type="odd")).data
        assert first[0] == "t"
        dying, *others = await asyncio.gather(
            server.call.post("get_env_profile", params={"split": "die"}),
            *(server.call.post("get_env_profile", env_type="odd") for _ in range(4)),
        )
        assert (dying.status, dying.error["code"]) == (500, "internal_error")
        assert dying.error["message"] == "the process of job query_list died, twice"
        assert [reply.data[0] for reply in others] == ["t"] * 4
        raised = await server.call.post("get_env_profile", params={"split": "raise"})
        assert (raised.status, raised.error["code"]) == (500, "env_error")
        assert "RuntimeError: raised in get_query_list" in raised.error["message"]
        assert (await server.call.post("get_env_profile", env_type="odd")).data[0] == "t"
