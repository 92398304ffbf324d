"""The client's guarantees, each against a real socket: a small scripted server that misbehaves on purpose.

CI runs this file under pydantic 1.10 and under pydantic 2. No test measures time: waits are tiny, or endless.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pickle
import socket
import subprocess
import sys
from collections import UserDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from conftest import Server

from aioenv.client import EnvClient, Score
from aioenv.client.retry import Failure, Policy, next_delay, repeatable, to_report
from aioenv.errors import (
    AtCapacity,
    BadRequest,
    CallFailed,
    Draining,
    EnvError,
    InstanceGone,
    StepTimeout,
    UnknownInstance,
)
from aioenv.schema import ActionMessage

CREATED = {
    "state": [{"role": "system", "content": "rules"}, {"role": "user", "content": "task"}],
    "reward": 0.0,
    "is_terminated": False,
    "info": {"instance_id": "i1", "task_id": "t1"},
}
STEPPED = {
    "state": [{"role": "user", "content": "Output: 1", "tool_calls": []}],
    "reward": 0.5,
    "is_terminated": False,
    "info": {"instance_id": "i1", "task_id": "t1", "step": 1},
}
Act = bytes | Callable[["Scripted", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def reply(data: Any, status: int = 200, **headers: str) -> bytes:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
    head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def ok(data: Any) -> bytes:
    return reply({"success": True, "data": data})


async def reset(server: Scripted, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def hang(server: Scripted, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()  # until the client goes
    server.gone.set()


TRUNCATED = b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"success": true, "da'
HTML_502 = reply(b"<html>Bad Gateway</html>", 502, Content_Type="text/html")
HTML_503 = reply(b"<html>no healthy upstream</html>", 503, Content_Type="text/html")
NOT_HTTP = b"SSH-2.0-OpenSSH_9.2\r\n\r\n"
NOT_JSON = reply(b"<html>log in here</html>")
FULL = reply(AtCapacity("64 of 64 instances live").payload(), 503, Retry_After="0")


class Scripted:
    """Plays one act per request, the last one over and over, and keeps what it saw."""

    def __init__(self) -> None:
        self.acts: list[Act] = []
        # What GET /healthz is answered, aside from the acts: no aiohttp, no header, unless a test says so.
        self.health: bytes | None = reply(b"OK")
        self.asked = 0
        self.paths: list[str] = []
        self.heads: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.seen = asyncio.Event()
        self.gone = asyncio.Event()
        self.url = ""
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((line for line in head.lower().splitlines() if line.startswith("content-length:")), ":0")
            body = await reader.readexactly(int(length.split(":")[1]))
            if head.startswith("GET /healthz") and self.health is not None:
                self.asked += 1
                writer.write(self.health)
                await writer.drain()
                return
            self.paths.append(head.split()[1])
            self.heads.append(head)
            self.bodies.append(json.loads(body or b"{}"))
            act = self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]
            self.seen.set()
            if isinstance(act, bytes):
                writer.write(act)
                await writer.drain()
            else:
                await act(self, reader, writer)


@pytest.fixture
async def server() -> AsyncIterator[Scripted]:
    scripted = Scripted()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        scripted.tasks.add(asyncio.create_task(scripted.serve(reader, writer)))

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, limit=2**24)
    scripted.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    yield scripted
    listener.close()
    for task in scripted.tasks:
        task.cancel()
    for outcome in await asyncio.gather(*scripted.tasks, return_exceptions=True):
        assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome


def client_of(server: Scripted | str, **options: Any) -> EnvClient:
    url = server if isinstance(server, str) else server.url
    return EnvClient(url, **{"min_backoff": 0.0, "max_backoff": 0.0, **options})


@pytest.fixture
def nobody() -> str:
    """The address of a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


CALLS: dict[str, Callable[[EnvClient], Awaitable[Any]]] = {
    "/get_env_profile": lambda client: client.get_env_profile("echo"),
    "/create": lambda client: client.create_instance("echo", "t1"),
    "/step": lambda client: client.step("i1", {"role": "assistant", "content": "x"}),
    "/evaluate": lambda client: client.evaluate("i1"),
    "/get_info": lambda client: client.get_tools_info("i1"),
    "/fork": lambda client: client.fork("i1", 2),
    "/checkpoint": lambda client: client.checkpoint("i1"),
    "/restore": lambda client: client.restore("i1", "c1"),
    "/release": lambda client: client.release_instance("i1"),
}
UNSAFE = {"/step", "/fork", "/checkpoint", "/restore"}  # to send twice, where the server keeps no replies
IDEMPOTENT = [route for route in CALLS if route not in UNSAFE]
GOOD = {
    "/get_env_profile": ["t1", "t2"],
    "/create": CREATED,
    "/step": STEPPED,
    "/evaluate": 0.75,
    "/get_info": "the tool",
    "/fork": [{"instance_id": "b1", "task_id": "t1", "step": 1}, {"instance_id": "b2", "task_id": "t1", "step": 1}],
    "/checkpoint": {"checkpoint": "c1", "instance_id": "i1", "step": 1},
    "/restore": {"checkpoint": "c1", "instance_id": "i1", "step": 1},
    "/release": None,
}


def error_of(result: Any, terminated: bool = False) -> dict[str, Any]:
    """`info.error` of a create's or step's fallback, once it is sure that it is one."""
    assert result["info"]["fallback"] is True
    assert (result["reward"], result["is_terminated"]) == (0.0, terminated)
    error: dict[str, Any] = result["info"]["error"]
    assert set(error) == {"code", "message", "retryable", "instance_gone", "status", "tries", "seconds"}
    return error


# ---- what is sent, and what comes back


async def test_each_call_sends_the_protocol_s_keys_and_returns_its_data(server: Scripted) -> None:
    async with client_of(server) as client:
        server.acts = [ok(["t1", "t2"])]
        assert await client.get_env_profile("echo", "dev", {"n": 1}) == ["t1", "t2"]
        server.acts = [ok(CREATED)]
        assert await client.create_instance("echo", "t1", "i1", {"sparse": True}) == CREATED
        server.acts = [ok(STEPPED)]
        assert await client.step("i1", ActionMessage(content="x"), {"p": 1}) == STEPPED
        server.acts = [ok(1)]
        score = await client.evaluate("i1", None, {"sparse": True})
        assert (score, type(score), score.fallback, score.error) == (1.0, Score, False, None)
        server.acts = [ok({"any": "thing"})]
        assert await client.get_tools_info("i1") == {"any": "thing"}
        server.acts = [reply({"success": True, "data": None})]
        assert await client.release_instance("i1") is True
        server.acts = [reply({"success": False, "data": None})]
        assert await client.release_instance("i1") is False
    assert server.paths == [
        "/get_env_profile",
        "/create",
        "/step",
        "/evaluate",
        "/get_info",
        "/release",
        "/release",
    ]
    ids = [body.pop("request_id") for body in server.bodies]
    assert len(set(ids)) == len(ids)
    assert server.bodies == [
        {"env_type": "echo", "params": {"split": "dev", "n": 1}},
        {"env_type": "echo", "task_id": "t1", "instance_id": "i1", "params": {"sparse": True}},
        {"instance_id": "i1", "messages": {"role": "assistant", "content": "x"}, "params": {"p": 1}},
        {"instance_id": "i1", "messages": {}, "params": {"sparse": True}},
        {"instance_id": "i1", "messages": {}, "params": {}},
        {"instance_id": "i1"},
        {"instance_id": "i1"},
    ]


async def test_it_plays_an_episode_on_an_aiohttp_server_over_kept_connections() -> None:
    worlds: dict[str, int] = {}
    connections = set()

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        connections.add(request.transport.get_extra_info("peername"))
        body = await request.json()
        key = body.get("instance_id")
        if request.path == "/api/create":
            worlds[key] = 0
            data: Any = {**CREATED, "info": {"instance_id": key, "task_id": body["task_id"]}}
        elif request.path == "/api/step":
            worlds[key] += 1
            data = {**STEPPED, "is_terminated": worlds[key] == 3, "reward": float(worlds[key] == 3)}
        else:
            return web.json_response({"success": worlds.pop(key, None) is not None, "data": None})
        return web.json_response({"success": True, "data": data})

    app = web.Application()
    app.router.add_post("/api/{route}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with client_of(f"http://127.0.0.1:{runner.addresses[0][1]}/api/") as client:
            created = await client.create_instance("echo", "t1")
            instance_id = created["info"]["instance_id"]
            rewards = []
            while True:
                stepped = await client.step(instance_id, {"role": "assistant", "content": "x"})
                rewards.append(stepped["reward"])
                if stepped["is_terminated"]:
                    break
            assert rewards == [0.0, 0.0, 1.0]
            assert await client.release_instance(instance_id) is True
    finally:
        await runner.cleanup()
    assert not worlds
    assert len(connections) == 1


async def test_older_services_list_their_tasks_under_task_ids(server: Scripted) -> None:
    server.acts = [reply({"success": True, "task_ids": ["t1"]})]
    async with client_of(server) as client:
        assert await client.get_env_profile("echo") == ["t1"]


async def test_a_token_is_sent_as_a_bearer(server: Scripted) -> None:
    server.acts = [ok(0.0)]
    async with client_of(server, token="s3cret") as client:
        await client.evaluate("i1")
    assert "Authorization: Bearer s3cret" in server.heads[0]


async def test_a_body_of_many_mib_is_sent_without_a_warning(server: Scripted) -> None:
    server.acts = [ok(STEPPED)]
    content = "é" * (3 * 2**20)
    async with client_of(server) as client:
        assert await client.step("i1", {"content": content}) == STEPPED
    assert server.bodies[0]["messages"]["content"] == content


async def test_hundreds_of_calls_are_in_flight_at_once(server: Scripted) -> None:
    together = asyncio.Barrier(300)

    async def answer(server: Scripted, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await together.wait()  # nobody gets a reply before all have asked
        writer.write(ok(1.0))

    server.acts = [answer]
    async with client_of(server) as client:
        scores = await asyncio.gather(*(client.evaluate(f"i{n}") for n in range(300)))
    assert scores == [1.0] * 300
    assert not any(score.fallback for score in scores)


# ---- failures, retries, fallbacks


@pytest.mark.parametrize("route", CALLS)
@pytest.mark.parametrize(
    ("act", "code", "status"),
    [
        (reset, "reply_lost", None),
        (b"", "reply_lost", None),
        (TRUNCATED, "reply_lost", None),
        (HTML_502, "http_error", 502),
        (HTML_503, "http_error", 503),
        (NOT_JSON, "bad_reply", 200),
        (reply(b""), "bad_reply", 200),
        (reply([1]), "bad_reply", 200),
        (NOT_HTTP, "bad_reply", None),
    ],
    ids=["reset", "closed", "truncated", "html-502", "html-503", "html-200", "empty", "list", "not-http"],
)
async def test_a_broken_exchange_is_retried_unless_it_may_have_run_a_step(
    server: Scripted, route: str, act: Act, code: str, status: int | None
) -> None:
    server.acts = [act]
    tries = 1 if route in UNSAFE else 3
    async with client_of(server, on_error="raise") as client:
        with pytest.raises(CallFailed) as caught:
            await CALLS[route](client)
    error = caught.value
    assert (error.code, error.status, error.tries) == (code, status, tries)
    assert error.retryable is (route not in UNSAFE)
    assert server.paths == [route] * tries
    assert len({body["request_id"] for body in server.bodies}) == 1
    assert len({json.dumps(body) for body in server.bodies}) == 1


@pytest.mark.parametrize("route", IDEMPOTENT)
@pytest.mark.parametrize("act", [reset, TRUNCATED, HTML_502, NOT_JSON, FULL])
async def test_a_later_try_that_succeeds_is_the_result(server: Scripted, route: str, act: Act) -> None:
    server.acts = [act, act, ok(GOOD[route])]
    async with client_of(server, on_error="raise") as client:
        assert await CALLS[route](client) == (True if route == "/release" else GOOD[route])
    assert len(server.paths) == 3


@pytest.mark.parametrize(
    ("route", "data"),
    [
        ("/get_env_profile", "t1"),
        ("/get_env_profile", [1]),
        ("/create", None),
        ("/create", {**CREATED, "state": []}),
        ("/create", {**CREATED, "state": "rules"}),
        ("/create", {**CREATED, "info": None}),
        ("/step", [STEPPED]),
        ("/step", {**STEPPED, "state": ["x"]}),
        ("/step", {**STEPPED, "reward": "1.0"}),
        ("/step", {**STEPPED, "is_terminated": None}),
        ("/evaluate", "1.0"),
        ("/evaluate", None),
        ("/fork", None),
        ("/fork", ["b1"]),
        ("/fork", [{"id": "b1"}]),
        ("/checkpoint", "c1"),
        ("/checkpoint", {"checkpoint": None}),
        ("/restore", {}),
    ],
)
async def test_a_success_of_the_wrong_shape_is_a_bad_reply_and_not_asked_for_again(
    server: Scripted, route: str, data: Any
) -> None:
    server.acts = [ok(data)]
    async with client_of(server, on_error="raise") as client:
        with pytest.raises(CallFailed, match="data") as caught:
            await CALLS[route](client)
    assert (caught.value.code, caught.value.status, caught.value.tries) == ("bad_reply", 200, 1)


@pytest.mark.parametrize("route", CALLS)
async def test_a_reply_without_data_is_a_bad_reply(server: Scripted, route: str) -> None:
    server.acts = [reply({"ok": 1})]
    async with client_of(server, on_error="raise") as client:
        with pytest.raises(CallFailed, match=r"no data|success is neither") as caught:
            await CALLS[route](client)
    assert (caught.value.code, caught.value.tries) == ("bad_reply", 1)


@pytest.mark.parametrize("route", CALLS)
@pytest.mark.parametrize("status", [400, 401, 404, 409, 410, 413, 429])
async def test_a_4xx_is_never_retried_whatever_its_body_says(server: Scripted, route: str, status: int) -> None:
    error = {"code": "some_code", "message": "why", "retryable": True, "instance_gone": status == 410}
    server.acts = [reply({"success": False, "detail": "why", "error": error}, status)]
    async with client_of(server, on_error="raise", retry_unsafe=True) as client:
        with pytest.raises(CallFailed, match="why") as caught:
            await CALLS[route](client)
    got = caught.value
    assert (got.code, got.status, got.tries, got.retryable) == ("some_code", status, 1, False)
    assert got.instance_gone is (status == 410)
    assert len(server.paths) == 1


@pytest.mark.parametrize(
    "raised", [EnvError("Traceback: boom"), StepTimeout("step passed its 150 s limit"), InstanceGone("idle for 3600 s")]
)
async def test_the_server_s_own_error_reaches_the_fallback_word_for_word(server: Scripted, raised: Any) -> None:
    server.acts = [reply(raised.payload(), raised.status)]
    async with client_of(server) as client:
        result = await client.step("i1", {"content": "x"})
    error = error_of(result, terminated=raised.instance_gone)
    assert error.pop("seconds") >= 0
    assert error == {
        "code": raised.code,
        "message": str(raised),
        "retryable": False,
        "instance_gone": raised.instance_gone,
        "status": raised.status,
        "tries": 1,
    }


@pytest.mark.parametrize("busy", [AtCapacity("full"), Draining("going")])
async def test_a_step_turned_away_with_our_503_is_retried(server: Scripted, busy: AtCapacity) -> None:
    server.acts = [reply(busy.payload(), 503, Retry_After="0")] * 2 + [ok(STEPPED)]
    async with client_of(server) as client:
        assert await client.step("i1", {"content": "x"}) == STEPPED
    assert len(server.paths) == 3
    assert len({body["request_id"] for body in server.bodies}) == 1


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_no_5xx_but_a_503_proves_that_a_step_did_not_run(server: Scripted, status: int) -> None:
    error = {"code": "some_code", "message": "why", "retryable": True, "instance_gone": False}
    server.acts = [reply({"success": False, "detail": "why", "error": error}, status, Retry_After="0")]
    async with client_of(server) as client:
        assert error_of(await client.step("i1", {"content": "x"}))["tries"] == 1
        assert (await client.evaluate("i1")).error["tries"] == 3  # type: ignore[index]


async def test_a_detail_without_an_error_object_is_still_told(server: Scripted) -> None:
    server.acts = [reply({"detail": "Traceback of an older service"}, 500)]
    async with client_of(server) as client:
        error = error_of(await client.step("i1"))
    assert (error["code"], error["status"], error["tries"]) == ("http_error", 500, 1)
    assert "Traceback of an older service" in error["message"]


async def test_a_redirect_is_not_followed(server: Scripted) -> None:
    server.acts = [reply(b"", 302, Location="/elsewhere")]
    async with client_of(server) as client:
        error = error_of(await client.create_instance("echo", "t1"))
    assert (error["code"], error["status"]) == ("http_error", 302)
    assert server.paths == ["/create"]


@pytest.mark.parametrize("route", CALLS)
async def test_a_refused_connection_is_retried_also_for_a_step(nobody: str, route: str) -> None:
    async with client_of(nobody, on_error="raise") as client:
        with pytest.raises(CallFailed, match=nobody) as caught:
            await CALLS[route](client)
    got = caught.value
    assert (got.code, got.status, got.tries, got.retryable) == ("connection_failed", None, 3, True)


async def test_a_connection_that_takes_too_long_is_retried_also_for_a_step() -> None:
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(8):  # fill the backlog: from then on the kernel drops what asks to connect
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(deaf.getsockname())
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        async with client_of(url, connect_timeout=0.02) as client:
            error = error_of(await client.step("i1", {"content": "x"}))
    assert (error["code"], error["tries"], error["retryable"]) == ("connection_failed", 3, True)


@pytest.mark.parametrize(("route", "tries"), [("/step", 1), ("/create", 2), ("/evaluate", 2)])
async def test_a_time_out_is_retried_unless_it_may_have_run_a_step(server: Scripted, route: str, tries: int) -> None:
    server.acts = [hang]
    options = {"timeout": 0.3, "timeout_jitter": (0, 0), "tries": 2, "on_error": "raise"}
    async with client_of(server, **options) as client:
        with pytest.raises(CallFailed) as caught:
            await CALLS[route](client)
    assert (caught.value.code, caught.value.status, caught.value.tries) == ("timeout", None, tries)
    assert len(server.paths) == tries


@pytest.mark.parametrize("act", [reset, TRUNCATED, HTML_502])
async def test_who_opts_in_has_steps_retried_too(server: Scripted, act: Act) -> None:
    server.acts = [act, ok(STEPPED)]
    async with client_of(server, retry_unsafe=True) as client:
        assert await client.step("i1", {"content": "x"}) == STEPPED
    assert len({body["request_id"] for body in server.bodies}) == 1
    assert server.asked == 0


@pytest.mark.parametrize("act", [reset, TRUNCATED, HTML_502, HTML_503, NOT_JSON, hang])
async def test_a_step_is_sent_again_to_a_server_that_will_not_run_it_again(server: Scripted, act: Act) -> None:
    """Told by a header, of an earlier reply or of /healthz."""
    server.health = reply(b"OK", Aioenv_Version="0.1.0")
    server.acts = [act, act, ok({**STEPPED, "info": {**STEPPED["info"], "replayed": True}})]
    async with client_of(server, timeout=0.3, timeout_jitter=(0, 0)) as client:
        stepped = await client.step("i1", {"content": "x"})
    assert stepped["info"]["replayed"] is True
    assert (server.paths, server.asked) == (["/step"] * 3, 1)
    assert len({body["request_id"] for body in server.bodies}) == 1


async def test_a_reply_tells_what_server_it_is(server: Scripted) -> None:
    server.acts = [
        reply({"success": True, "data": CREATED}, Aioenv_Version="0.1.0"),
        reset,
        ok(STEPPED),
    ]
    async with client_of(server) as client:
        await client.create_instance("echo", "t1")
        assert await client.step("i1", {"content": "x"}) == STEPPED
    assert server.asked == 0


async def test_a_step_whose_outcome_stays_unknown_is_told_so_after_all_tries(server: Scripted) -> None:
    server.health = reply(b"OK", Aioenv_Version="0.1.0")
    server.acts = [reset, FULL]
    async with client_of(server) as client:
        stepped = await client.step("i1", {"content": "x"})
    error = error_of(stepped)
    assert (error["code"], error["tries"], error["retryable"]) == ("reply_lost", 3, True)
    assert "It is unknown whether the action ran." in stepped["state"][0]["content"]


async def test_a_lost_reply_runs_nothing_twice_on_a_real_server(echo: Server) -> None:
    """A proxy that loses the first reply to each request: the action has run, and its client doesn't know."""
    upstream = urlsplit(echo.call.url)
    lost: set[str] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.decode().lower().splitlines() if line.startswith("content-length:"))
            body = await reader.readexactly(int(length.split(":")[1]))
            up, down = await asyncio.open_connection(upstream.hostname, upstream.port)
            with contextlib.closing(down):
                down.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body)
                answer = await up.read()
            request_id = json.loads(body)["request_id"]
            if request_id in lost:
                writer.write(answer)
                await writer.drain()
            lost.add(request_id)

    async with await asyncio.start_server(pump, "127.0.0.1", 0) as proxy:
        url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        async with client_of(url, on_error="raise", tries=2) as client:
            created = await client.create_instance("echo", "t")
            instance_id = created["info"]["instance_id"]
            for number in range(1, 6):
                stepped = await client.step(instance_id, {"content": f"step {number}"})
                assert (stepped["info"]["step"], stepped["info"]["replayed"]) == (number, True)
                assert stepped["state"][0]["content"] == f"step {number}"
            assert len((await echo.call.get("instances")).body) == 1
            assert await client.release_instance(instance_id) is True


async def test_a_create_without_an_id_keeps_one_of_its_own_over_all_tries(server: Scripted) -> None:
    server.acts = [reset, TRUNCATED, HTML_502]
    async with client_of(server) as client:
        one = await client.create_instance("echo", "t1")
        first = {body["instance_id"] for body in server.bodies}
        two = await client.create_instance("echo", "t1")
    assert len(server.bodies) == 6
    assert first == {one["info"]["instance_id"]}
    assert one["info"]["instance_id"] != two["info"]["instance_id"]


async def test_max_retry_is_the_number_of_tries_and_defaults_to_the_constructor_s(server: Scripted) -> None:
    server.acts = [HTML_502]
    async with client_of(server, tries=2) as client:
        assert (await client.evaluate("i1")).error["tries"] == 2  # type: ignore[index]
        assert (await client.evaluate("i1", None, None, 5)).error["tries"] == 5  # type: ignore[index]
        assert await client.release_instance("i1", max_retry=1) is False
    assert len(server.paths) == 2 + 5 + 1


async def test_each_call_has_its_fallback_and_says_so_where_it_can(server: Scripted) -> None:
    server.acts = [reset]
    async with client_of(server, tries=1) as client:
        assert await client.get_env_profile("echo") == []
        assert await client.get_tools_info("i1") is None
        assert await client.release_instance("i1") is False
        score = await client.evaluate("i1")
        created = await client.create_instance("echo", "t1", "mine")
        stepped = await client.step("mine", {"content": "x"})
    assert isinstance(score, float)
    assert (score, score.fallback) == (0.0, True)
    assert score.error is not None
    assert score.error["code"] == "reply_lost"
    assert [message["role"] for message in created["state"]] == ["system", "user"]
    assert "could not be created" in created["state"][0]["content"]
    assert (created["info"]["instance_id"], created["info"]["task_id"]) == ("mine", "t1")
    assert error_of(created)["code"] == "reply_lost"
    (message,) = stepped["state"]
    assert (message["role"], message["tool_calls"]) == ("assistant", [])
    assert "failed" in message["content"]
    assert "unknown whether the action ran" in message["content"]
    assert (stepped["info"]["instance_id"], stepped["info"]["task_id"]) == ("mine", "")
    assert error_of(stepped)["retryable"] is False


async def test_a_step_s_fallback_says_what_became_of_the_action(server: Scripted, nobody: str) -> None:
    async with client_of(nobody) as client:
        assert "was not run" in (await client.step("i1"))["state"][0]["content"]
    async with client_of(server) as client:
        server.acts = [reply(InstanceGone("idle").payload(), 410)]
        assert "has ended" in (await client.step("i1"))["state"][0]["content"]
        server.acts = [reply(EnvError("boom").payload(), 500)]
        assert "no observation" in (await client.step("i1"))["state"][0]["content"]


@pytest.mark.parametrize("raised", [InstanceGone("idle"), StepTimeout("slow"), UnknownInstance("restarted")])
async def test_a_worker_is_told_to_stop_where_no_step_will_succeed_any_more(server: Scripted, raised: Any) -> None:
    server.acts = [reply(raised.payload(), raised.status)]
    async with client_of(server) as client, client_of(server, terminate_when_gone=False) as reference:
        assert (await client.step("i1"))["is_terminated"] is True
        assert (await reference.step("i1"))["is_terminated"] is False
        server.acts = [reply(EnvError("boom").payload(), 500)]
        assert (await client.step("i1"))["is_terminated"] is False


async def test_what_a_client_goes_through_is_counted_and_told(server: Scripted) -> None:
    told = []

    def on_failure(route: str, subject: str, error: CallFailed) -> None:
        told.append((route, subject, error.code))
        raise RuntimeError("a callback that fails is no failure of the call")

    replayed = {**STEPPED, "info": {**STEPPED["info"], "replayed": True}}
    server.acts = [ok(CREATED), FULL, ok(replayed), reply(EnvError("boom").payload(), 500), reset]
    async with client_of(server, on_failure=on_failure) as client:
        await client.create_instance("echo", "t1")
        await client.step("i1")
        assert client.stats.fallbacks == 0
        await client.step("i1")
        await client.evaluate("i1")
        await client.step("")
    stats = client.stats.to_dict()
    assert stats.pop("seconds") > 0
    assert stats == {
        "calls": 5,
        "tries": 7,
        "retried": 1,
        "replayed": 1,
        "fallbacks": 3,
        "failures/bad_request": 1,
        "failures/env_error": 1,
        "failures/reply_lost": 1,
    }
    assert told == [
        ("/step", "instance_id i1", "env_error"),
        ("/evaluate", "instance_id i1", "reply_lost"),
        ("/step", "", "bad_request"),
    ]


async def test_branching_sends_what_it_is_told(server: Scripted) -> None:
    async with client_of(server) as client:
        server.acts = [ok(GOOD["/fork"])]
        branches = await client.fork("i1", 2)
        assert (branches, branches.fallback, branches.error) == (GOOD["/fork"], False, None)
        await client.fork("i1", instance_ids=("b1", "b2"))
        server.acts = [ok(GOOD["/checkpoint"])]
        assert await client.checkpoint("i1") == await client.checkpoint("i1", True, 60.0) == GOOD["/checkpoint"]
        assert await client.restore("i1") == await client.restore("i1", "c1") == GOOD["/restore"]
    assert all(body.pop("request_id") and body.pop("instance_id") == "i1" for body in server.bodies)
    assert [body.pop("params") for body in server.bodies] == [
        {"n": 2},
        {"n": 2, "instance_ids": ["b1", "b2"]},
        {"keep": False, "ttl": None},
        {"keep": True, "ttl": 60.0},
        {"checkpoint": None},
        {"checkpoint": "c1"},
    ]
    assert not any(server.bodies)


@pytest.mark.parametrize(
    ("act", "code"),
    [
        (reply({"detail": "Not Found"}, 404), "http_error"),
        (reply(BadRequest("there is no /fork").payload(), 404, Aioenv_Version="0"), "bad_request"),
        (reset, "reply_lost"),
        (reply(InstanceGone("idle").payload(), 410), "instance_gone"),
    ],
    ids=["another service", "older", "lost", "gone"],
)
async def test_branching_that_fails_can_be_told_from_what_succeeds(server: Scripted, act: Act, code: str) -> None:
    server.acts = [act]
    async with client_of(server) as client:
        branches = await client.fork("i1", 2)
        made = await client.checkpoint("i1")
        restored = await client.restore("i1", "c1")
    assert (branches, branches.fallback, branches.error and branches.error["code"]) == ([], True, code)
    for data in (made, restored):
        assert (data["instance_id"], data["checkpoint"]) == ("i1", "")
        assert (data["info"]["fallback"], data["info"]["error"]["code"]) == (True, code)
    assert len(server.paths) == 3  # none was sent twice
    again = pickle.loads(pickle.dumps(branches))
    assert (again, again.fallback, again.error) == (branches, True, branches.error)


@pytest.mark.parametrize("ids", ["b1", 5, ["b1", ""], [1]])
async def test_wrong_ids_of_branches_are_not_sent(server: Scripted, ids: Any) -> None:
    async with client_of(server) as client:
        branches = await client.fork("i1", instance_ids=ids)
    assert branches.error is not None
    assert (branches.error["code"], branches.error["tries"]) == ("bad_request", 0)
    assert server.paths == []


async def test_two_fallbacks_share_nothing(nobody: str) -> None:
    async with client_of(nobody) as client:
        one, two = await client.step("i1"), await client.step("i1")
        one["state"][0]["content"] = "changed"
        one["info"]["error"]["code"] = "changed"
        assert two["state"][0]["content"] != "changed"
        assert two["info"]["error"]["code"] == "connection_failed"


def test_a_score_keeps_its_mark_through_pickle() -> None:
    score = pickle.loads(pickle.dumps(Score(0.0, {"code": "timeout"})))
    assert (score, score.fallback, score.error) == (0.0, True, {"code": "timeout"})
    assert json.dumps(Score(0.5)) == "0.5"


# ---- deadline, Retry-After, cancellation, closing


async def test_the_deadline_cuts_a_try_short(server: Scripted) -> None:
    server.acts = [hang]
    async with client_of(server, deadline=0.05, timeout=1e6) as client:
        error = (await client.evaluate("i1")).error
    assert error is not None
    assert (error["code"], error["tries"]) == ("timeout", 1)


async def test_a_wait_that_would_pass_the_deadline_is_not_begun(server: Scripted) -> None:
    server.acts = [HTML_502]
    async with client_of(server, deadline=500, min_backoff=1e6, max_backoff=1e6) as client:
        error = (await client.evaluate("i1")).error
    assert error is not None
    assert (error["code"], error["tries"]) == ("http_error", 1)


async def test_retry_after_is_honoured_and_capped(server: Scripted) -> None:
    server.acts = [reply(AtCapacity("full").payload(), 503, Retry_After="100000")]
    async with client_of(server, deadline=500, max_retry_after=1e6) as client:  # honoured: it would pass the deadline
        assert error_of(await client.create_instance("echo", "t1"))["tries"] == 1
    async with client_of(server, max_retry_after=0.001) as client:  # capped: else this test would take days
        assert error_of(await client.create_instance("echo", "t1"))["tries"] == 3


@pytest.mark.parametrize("route", CALLS)
async def test_a_cancelled_call_stops_and_leaves_nothing_pending(server: Scripted, route: str) -> None:
    server.acts = [hang]
    async with client_of(server) as client:
        before = asyncio.all_tasks()
        call = asyncio.ensure_future(CALLS[route](client))
        await server.seen.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.gone.wait()  # the connection is closed at once, not when the client is
        assert asyncio.all_tasks() - before - server.tasks == set()
        server.acts = [ok(GOOD[route])]
        assert await CALLS[route](client) == (True if route == "/release" else GOOD[route])


class Told(logging.Handler):
    """Sets an event at the first log record: the client logs just before it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


async def test_a_call_cancelled_between_two_tries_makes_no_second_one(server: Scripted) -> None:
    server.acts = [HTML_502]
    told = Told()
    logging.getLogger("aioenv.client").addHandler(told)
    try:
        async with client_of(server, min_backoff=1e6, max_backoff=1e6) as client:
            call = asyncio.ensure_future(client.evaluate("i1"))
            await told.event.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
    finally:
        logging.getLogger("aioenv.client").removeHandler(told)
    assert len(server.paths) == 1


@pytest.mark.parametrize("route", CALLS)
async def test_a_closed_client_says_so_and_sends_nothing(server: Scripted, route: str) -> None:
    server.acts = [ok(GOOD[route])]
    client = client_of(server, on_error="raise")
    await CALLS[route](client)
    await client.close()
    await client.close()
    with pytest.raises(CallFailed, match="the client is closed") as caught:
        await CALLS[route](client)
    assert (caught.value.code, caught.value.tries) == ("client_closed", 0)
    assert await client.healthz() is False
    assert len(server.paths) == 1


async def test_a_call_in_flight_ends_when_the_client_closes(server: Scripted) -> None:
    server.acts = [hang]
    client = client_of(server)
    call = asyncio.ensure_future(client.step("i1", {"content": "x"}))
    await server.seen.wait()
    await client.close()
    result = await call
    assert (error_of(result)["code"], error_of(result)["tries"]) == ("client_closed", 1)
    assert "unknown" in result["state"][0]["content"]


def test_a_client_used_in_a_second_event_loop_says_so(nobody: str) -> None:
    client = client_of(nobody, tries=1)
    one, two = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        assert one.run_until_complete(client.step("i1"))["info"]["error"]["code"] == "connection_failed"
        error = two.run_until_complete(client.step("i1"))["info"]["error"]
        assert (error["code"], error["tries"]) == ("client_closed", 0)
        assert "another event loop" in error["message"]
        one.run_until_complete(client.close())
    finally:
        one.close()
        two.close()


async def test_probes_never_raise(server: Scripted, nobody: str) -> None:
    async with client_of(nobody, on_error="raise") as client:
        assert (await client.healthz(), await client.ready()) == (False, False)
    server.health = None
    async with client_of(server, on_error="raise") as client:
        server.acts = [reply(b"OK"), reply({"ready": False}, 503), hang]
        assert (await client.healthz(), await client.ready()) == (True, False)
        assert await client.ready(timeout=0.3) is False
    assert server.paths == ["/healthz", "/readyz", "/readyz"]


# ---- the caller's mistakes


class Evil(UserDict[str, Any]):
    def keys(self) -> Any:
        raise RuntimeError("evil mapping")

    __iter__ = keys


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"action": ["x"]}, "messages must be a dict, a Message or None, not list"),
        ({"action": "x"}, "not str"),
        ({"params": [1]}, "params must be a dict"),
        ({"params": {"x": {1, 2}}}, "set is no JSON type"),
        ({"params": {"x": 2**70}}, "64-bit"),
        ({"params": Evil(a=1)}, "evil mapping"),
        ({"action": {"content": "\ud83d"}}, "surrogates"),
        ({"instance_id": ""}, "instance_id must be a non-empty string"),
        ({"instance_id": None}, "instance_id must be a non-empty string, not None"),
        ({"max_retry": 0}, "max_retry must be an int of at least 1, not 0"),
        ({"max_retry": "3"}, "max_retry"),
    ],
)
async def test_a_wrong_argument_is_a_marked_fallback_and_sends_nothing(
    server: Scripted, arguments: dict[str, Any], why: str
) -> None:
    server.acts = [ok(STEPPED)]
    async with client_of(server) as client:
        result = await client.step(**{"instance_id": "i1", **arguments})
    error = error_of(result)
    assert (error["code"], error["tries"], error["status"]) == ("bad_request", 0, None)
    assert why in error["message"]
    assert "was not run" in result["state"][0]["content"]
    assert server.paths == []


async def test_what_json_would_take_from_a_trainer_is_sent(server: Scripted) -> None:
    server.acts = [ok(STEPPED)]
    params = {1: (1, 2), "nested": UserDict(a=ActionMessage(content="x"))}
    async with client_of(server) as client:
        assert await client.step("i1", UserDict(content="x"), params) == STEPPED  # type: ignore[arg-type]
    assert server.bodies[0]["messages"] == {"content": "x"}
    assert server.bodies[0]["params"] == {"1": [1, 2], "nested": {"a": {"role": "assistant", "content": "x"}}}


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "127.0.0.1:8080"},
        {"base_url": "ftp://host"},
        {"base_url": "http://"},
        {"base_url": "http://host:notaport"},
        {"tries": 0},
        {"tries": True},
        {"min_backoff": 5, "max_backoff": 1},
        {"min_backoff": -1},
        {"timeout": -1000},
        {"connect_timeout": 0},
        {"deadline": 0},
        {"max_retry_after": -1},
        {"on_error": "ignore"},
        {"token": "line\nbreak"},
    ],
)
def test_a_wrong_option_is_a_value_error_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        EnvClient(**options)


def test_the_time_out_is_jittered_and_drawn_once_per_client() -> None:
    clients = [EnvClient() for _ in range(50)]
    assert all(200 <= client.timeout <= 350 for client in clients)
    assert len({client.timeout for client in clients}) > 40
    assert clients[0].timeout == clients[0].timeout
    assert EnvClient(timeout=7, timeout_jitter=(0, 0)).timeout == 7


def test_a_client_can_be_made_outside_of_an_event_loop_and_thrown_away() -> None:
    EnvClient()


# ---- the decisions, without a socket

LOST = Failure("reply_lost", "", retryable=True)
REFUSED = Failure("connection_failed", "", retryable=True, never_ran=True)
BUSY = Failure("at_capacity", "", status=503, retryable=True, never_ran=True, retry_after=7.0)
SAID_NO = Failure("bad_request", BadRequest.code, status=400, retryable=True)


@pytest.mark.parametrize(
    ("failure", "idempotent", "unsafe", "again"),
    [
        (LOST, True, False, True),
        (LOST, False, False, False),
        (LOST, False, True, True),
        (REFUSED, False, False, True),
        (BUSY, False, False, True),
        (SAID_NO, True, True, False),
        (Failure("env_error", "", status=500), True, True, False),
    ],
)
def test_only_what_is_retryable_and_safe_is_sent_again(
    failure: Failure, idempotent: bool, unsafe: bool, again: bool
) -> None:
    assert repeatable(failure, Policy(retry_unsafe=unsafe), idempotent=idempotent) is again


def delays(failure: Failure, policy: Policy, done: int) -> list[float | None]:
    """The shortest and the longest delay after `done` tries of 10."""
    return [
        next_delay(failure, policy, idempotent=True, tries=10, done=done, elapsed=0.0, uniform=uniform)
        for uniform in (lambda low, high: low, lambda low, high: high)
    ]


def test_backoff_grows_from_its_lower_to_its_upper_bound() -> None:
    assert [delays(LOST, Policy(), done) for done in (1, 2, 9)] == [[3.0, 6.0], [3.0, 10.0], [3.0, 10.0]]
    assert delays(LOST, Policy(min_backoff=0.0, max_backoff=0.0), 5000) == [None, None]
    assert delays(LOST, Policy(max_backoff=4.0), 1) == [3.0, 4.0]
    assert delays(LOST, Policy(), 10) == [None, None]


def test_retry_after_is_the_least_wait_and_jittered_on_top() -> None:
    assert delays(BUSY, Policy(), 1) == [7.0, 10.0]
    assert delays(BUSY, Policy(max_retry_after=2.0), 1) == [2.0, 5.0]


def test_an_action_that_may_have_run_is_never_reported_as_not_run() -> None:
    assert to_report([LOST, REFUSED], idempotent=False) is LOST
    assert to_report([LOST, REFUSED], idempotent=True) is REFUSED
    assert to_report([REFUSED, BUSY], idempotent=False) is BUSY
    assert to_report([LOST, SAID_NO], idempotent=False) is SAID_NO


def test_importing_the_client_imports_neither_server_nor_pool_nor_envs_nor_jinja2() -> None:
    code = (
        "import sys, aioenv.client; "
        "bad = {'jinja2', 'appworld', 'aioenv.server', 'aioenv.pool', 'aioenv.envs'}; "
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
