"""The ReAct example, against a stand-in for a chat endpoint: whole episodes on the real engine, and the chat client."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_standin import Gold, Messages, StandIn
from conftest import Caller

from aioenv.schema import ActionMessage, Message, Role, StateMessage, ToolCall

EXAMPLES = Path(__file__).parent.parent / "examples"
KEY = "sk-of-the-test-0123456789"
# One of each of the scenarios in the split `train`, but for the last.
TASKS = [f"demo{number}_2" for number in ("01", "02", "03", "05", "06", "07", "10", "13")]
STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@pytest.fixture(scope="module")
def chat() -> Iterator[Any]:
    """The examples' module of this name; they find each other by their folder, as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("chat")


@pytest.fixture(scope="module")
def react(chat: Any) -> Any:
    return importlib.import_module("react")


@pytest.fixture(scope="module")
def context(chat: Any) -> Any:
    return importlib.import_module("context")


# -- whole episodes ----------------------------------------------------------------------------------------------------


class Outcome:
    """What a run of the example printed and wrote."""

    def __init__(self, status: int | None, out: str, err: str, trace: Path) -> None:
        self.status = status
        self.text = out + err
        assert KEY not in self.text
        *lines, self.summary = out.splitlines() or [""]
        rows = [re.fullmatch(r"(\w+) +(\d+) +(\S+) +[\d.]+ *(.*)", line) for line in lines[1:]]
        self.rows = {row[1]: (int(row[2]), row[3], row[4]) for row in rows if row}
        assert len(self.rows) == len(lines[1:]), out
        written = trace.read_text(encoding="utf-8") if trace.exists() else ""
        assert KEY not in written
        self.trajectories = {line["task_id"]: line for line in map(json.loads, written.splitlines())}

    @property
    def scores(self) -> dict[str, str]:
        return {task_id: reward for task_id, (_, reward, _) in self.rows.items()}

    @property
    def errors(self) -> dict[str, str]:
        return {task_id: error.partition(":")[0] for task_id, (_, _, error) in self.rows.items() if error}


@contextlib.asynccontextmanager
async def started(*command: str, environ: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python script, which is killed where it has not ended by then."""
    pipe = asyncio.subprocess.PIPE
    env = {**os.environ, **environ}
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, stderr=pipe, env=env)
    try:
        async with asyncio.timeout(200):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def react_command(url: str, *args: str) -> tuple[str, ...]:
    return (str(EXAMPLES / "react.py"), "--url", url, "--model", "gold", *args)


async def run(url: str, base_url: str, folder: Path, *args: str) -> Outcome:
    """`python examples/react.py` as a user starts it."""
    trace = folder / "trace.jsonl"
    environ = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY}
    async with started(*react_command(url, "--trace", str(trace), *args), environ=environ) as process:
        out, err = await process.communicate()
    return Outcome(process.returncode, out.decode(), err.decode(), trace)


@STREAMED
async def test_eight_tasks_at_once_are_solved(appworld_url: str, demo_root: Path, tmp_path: Path, stream: bool) -> None:
    options = () if stream else ("--no-stream", "--temperature", "0.5", "--max-tokens", "99", "--extra", '{"seed": 7}')
    async with StandIn(Gold(demo_root), api_key=KEY).running() as standin:
        outcome = await run(appworld_url, standin.url, tmp_path, "--tasks", "8", *options)
    assert (outcome.status, outcome.summary) == (0, "8 episodes, mean reward 1.00, 0 failed"), outcome.text
    assert set(outcome.scores.values()) == {"1.00"}
    assert outcome.trajectories.keys() == outcome.rows.keys()
    for task_id, trajectory in outcome.trajectories.items():
        assert trajectory["reward"]["value"] == 1.0
        assert len(trajectory["steps"]) == outcome.rows[task_id][0] > 2
        for step in trajectory["steps"]:
            assert "Schritt für Schritt, 一步一步, 🐾" in step["action"]["content"]
    for request in standin.requests:
        keys = {"model", "messages", "stream"} if stream else {*request, "temperature", "max_tokens", "seed"}
        assert request.keys() == keys
        assert (request["model"], request["stream"]) == ("gold", stream)
        assert all(message["content"] for message in request["messages"])


@STREAMED
async def test_what_may_pass_is_tried_again_and_what_may_not_ends_its_episode_alone(
    appworld_url: str, demo_root: Path, tmp_path: Path, stream: bool
) -> None:
    # To wait for a deadline once is enough.
    last, error = ("slow", "deadline") if stream else ("400", "chat_refused")
    faults = {
        TASKS[0]: iter(["429", "", "503"]),
        TASKS[1]: iter(["", "drop"]),
        TASKS[2]: iter(["page", "", "broken"]),
        TASKS[3]: iter(["", "500"]),
        TASKS[4]: itertools.repeat("401"),
        TASKS[5]: iter(["", "404"]),
        TASKS[6]: itertools.chain([""], itertools.repeat("context")),
        TASKS[7]: itertools.chain(["", ""], itertools.repeat(last)),
    }
    async with StandIn(Gold(demo_root), faults=faults).running() as standin:
        options = ("--episode-timeout", "30", "--stream" if stream else "--no-stream")
        outcome = await run(appworld_url, standin.url, tmp_path, *options, *TASKS)
    assert outcome.status == 0, outcome.text
    assert outcome.scores == dict.fromkeys(TASKS[:4], "1.00") | dict.fromkeys(TASKS[4:], "-"), outcome.text
    assert outcome.errors == {
        TASKS[4]: "chat_unauthorized",
        TASKS[5]: "chat_not_found",
        TASKS[6]: "chat_context_too_long",
        TASKS[7]: error,
    }
    assert outcome.summary == "8 episodes, mean reward 1.00, 4 failed"
    assert "Incorrect API key provided: [API key]." in outcome.text
    assert [len(outcome.trajectories[task_id]["steps"]) for task_id in TASKS[4:]] == [0, 1, 1, 2]
    for task_id in TASKS[4:]:
        assert outcome.trajectories[task_id]["info"]["error"]["code"] == outcome.errors[task_id]


async def test_whatever_form_the_answers_have_the_env_is_given_them(
    appworld_url: str, demo_root: Path, tmp_path: Path
) -> None:
    names = ("tool calls", "several blocks", "no block", "nothing", "thinks", "cut off")
    styles = dict(zip(TASKS, names, strict=False))
    tasks = dict(zip(names, TASKS, strict=False))
    async with StandIn(Gold(demo_root, styles)).running() as standin:
        outcome = await run(appworld_url, standin.url, tmp_path, *styles)
    assert outcome.scores == dict.fromkeys(styles, "1.00"), outcome.text

    def told(name: str, step: int) -> str:
        return str(outcome.trajectories[tasks[name]]["steps"][step]["state"][0]["content"])

    assert "are not valid JSON" in told("tool calls", 0)
    assert "Only the first of your 2 tool calls was run" in told("tool calls", 1)
    assert "No code was found" in told("no block", 0)
    assert "No code was found" in told("nothing", 0)
    thinking = outcome.trajectories[tasks["thinks"]]["steps"][0]["action"]
    assert "raise SystemExit" in thinking["metadata"]["reasoning"]
    assert "raise SystemExit" not in thinking["content"]
    # What has tool calls in it has to go on as endpoints demand.
    calling = max((r["messages"] for r in standin.requests if "tool_calls" in str(r)), key=len)
    assert [message["role"] for message in calling[:6]] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [call["id"] for call in calling[2]["tool_calls"]] == [answer["tool_call_id"] for answer in calling[3:5]]
    assert calling[2]["tool_calls"][0]["function"]["arguments"] == "{}"


async def test_a_conversation_that_is_too_long_for_the_model_is_shortened(
    appworld_url: str, demo_root: Path, tmp_path: Path
) -> None:
    async with StandIn(Gold(demo_root)).running() as standin:
        await run(appworld_url, standin.url, tmp_path, TASKS[7])
    sizes = [sum(len(message["content"]) for message in request["messages"]) for request in standin.requests]
    limit = sizes[0] + 900  # the task and the last turn
    assert sizes[-1] > limit
    async with StandIn(Gold(demo_root), max_chars=limit).running() as standin:
        told = await run(appworld_url, standin.url, tmp_path, TASKS[7])
        assert "characters are too long for the model" in told.text
    async with StandIn(Gold(demo_root), max_chars=limit).running() as standin:
        knew = await run(appworld_url, standin.url, tmp_path, "--max-context", str(limit), TASKS[7])
        assert "too long" not in knew.text
    for outcome in (told, knew):
        assert outcome.scores == {TASKS[7]: "1.00"}, outcome.text


async def test_a_run_without_any_score_fails(appworld_url: str, demo_root: Path, tmp_path: Path) -> None:
    async with StandIn(Gold(demo_root), api_key="sk-another-one").running() as standin:
        outcome = await run(appworld_url, standin.url, tmp_path, "--tasks", "2")
    assert (outcome.status, outcome.summary) == (1, "2 episodes, no reward, 2 failed")
    assert len(standin.requests) == 2


async def test_an_interrupt_releases_the_worlds(appworld: Caller, demo_root: Path) -> None:
    faults = {task_id: itertools.repeat("slow") for task_id in TASKS}
    async with StandIn(Gold(demo_root), faults=faults).running() as standin:
        command = react_command(appworld.url, *TASKS)
        async with started(*command, environ={"OPENAI_BASE_URL": standin.url}) as process:
            while len(standin.requests) < len(TASKS):
                await asyncio.sleep(0.05)
            assert len((await appworld.get("instances")).body) == len(TASKS)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    assert (process.returncode, out) == (130, b""), err.decode()


async def test_the_stand_in_can_be_started_by_hand(appworld_url: str, demo_root: Path, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("chat_standin.py"))
    async with started(script, str(demo_root), "--port", "0", environ={}) as process:
        assert process.stdout is not None
        base_url = (await process.stdout.readline()).decode().strip().removeprefix("export OPENAI_BASE_URL=")
        outcome = await run(appworld_url, base_url, tmp_path, TASKS[0])
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    assert outcome.scores == {TASKS[0]: "1.00"}, outcome.text


async def test_a_split_that_is_not_there_is_told(appworld_url: str) -> None:
    command = react_command(appworld_url, "--split", "nope")
    async with started(*command, environ={"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}) as process:
        _, err = await process.communicate()
    assert process.returncode == 1
    assert b"unknown split 'nope'" in err
    assert b"gave no tasks" in err


async def test_no_endpoint_is_told() -> None:
    async with started(*react_command("http://127.0.0.1:9"), environ={"OPENAI_BASE_URL": ""}) as process:
        _, err = await process.communicate()
    assert process.returncode == 2
    assert b"set OPENAI_BASE_URL" in err


async def test_wrong_options_are_told(tmp_path: Path) -> None:
    for options, words in [
        (("--extra", "5"), "--extra"),
        (("--tasks", "0"), "at least 1"),
        (("--url", "nowhere"), "--url: base_url must look like"),
        (("--base-url", "ftp://x"), "the base URL must look like"),
        (("--api-key", "a\nb"), "printable ASCII"),
        (("--trace", str(tmp_path / "no" / "folder")), "No such file or directory"),
    ]:
        outcome = await run("http://127.0.0.1:9", "http://x/v1", tmp_path, *options)
        assert outcome.status == 2
        assert words in outcome.text


# -- the chat client ---------------------------------------------------------------------------------------------------


class Parrot:
    """Says what it was told last. Its conversations are all the same one."""

    def name(self, messages: Messages) -> str:
        return "all"

    def answer(self, messages: Messages) -> dict[str, Any]:
        return {"content": messages[-1]["content"]}


async def ask(chat: Any, faults: Iterator[str], stream: bool, **options: Any) -> tuple[Any, int]:
    """What comes of one call, an answer or an error, and how many requests it took."""
    async with (
        StandIn(Parrot(), faults={"all": faults}).running() as standin,
        chat.Chat(standin.url, "parrot", stream=stream, **{"backoff": 0.01, "tries": 3, **options}) as client,
    ):
        try:
            outcome = await client.complete([{"role": "user", "content": "Grüße, 世界 🐾"}])
        except chat.ChatError as error:
            outcome = error
        return outcome, len(standin.requests)


@STREAMED
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("429", "chat_rate_limited"),
        ("500", "chat_server_error"),
        ("503", "chat_server_error"),
        ("error", "chat_server_error"),
        ("no reply", "chat_connection_failed"),
        ("drop", "chat_connection_failed"),
        ("page", "chat_bad_reply"),
        ("broken", "chat_bad_reply"),
        ("nothing", "chat_bad_reply"),
        ("slow", "chat_timeout"),
    ],
)
async def test_what_may_pass_is_tried_again_a_few_times(chat: Any, fault: str, code: str, stream: bool) -> None:
    options = {"timeout": 0.5 if fault == "slow" else 60.0}
    outcome, requests = await ask(chat, iter([fault, fault]), stream, **options)
    assert isinstance(outcome, ActionMessage), outcome
    assert (outcome.content, requests) == ("Grüße, 世界 🐾", 3)
    outcome, requests = await ask(chat, itertools.repeat(fault), stream, **options)
    assert (outcome.code, requests) == (code, 3)


@STREAMED
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("400", "chat_refused"),
        ("401", "chat_unauthorized"),
        ("404", "chat_not_found"),
        ("context", "chat_context_too_long"),
        ("429 for good", "chat_rate_limited"),
    ],
)
async def test_what_may_not_pass_is_an_error_at_once(chat: Any, fault: str, code: str, stream: bool) -> None:
    outcome, requests = await ask(chat, iter([fault]), stream, api_key=KEY)
    assert (outcome.code, requests) == (code, 1)
    assert str(outcome).startswith(f"{fault[:3]}: " if fault != "context" else "400: ")
    assert KEY not in str(outcome)


async def test_a_stream_that_stops_short_is_no_answer(chat: Any) -> None:
    outcome, requests = await ask(chat, iter(["short", "short"]), True)
    assert (outcome.content, requests) == ("Grüße, 世界 🐾", 3)


async def test_where_nobody_listens_it_is_tried_again_and_told(chat: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with StandIn(Parrot()).running() as gone:
        url = gone.url
    async with chat.Chat(url, "parrot", backoff=0.01, tries=3) as client:
        with pytest.raises(chat.ChatError) as told:
            await client.complete([])
    assert told.value.code == "chat_connection_failed"
    assert [record.message[:8] for record in caplog.records if record.name == "chat"] == ["try 1 of", "try 2 of"]


def test_waits_are_what_the_endpoint_says_or_grow(chat: Any) -> None:
    for _ in range(100):
        assert 7.0 <= chat.wait_before_retry(1, 1.0, 7.0) <= 10.5
        assert 4.0 <= chat.wait_before_retry(3, 1.0, None) <= 6.0
        assert chat.wait_before_retry(1, 1.0, 1e9) == pytest.approx(75.0, abs=15.0)
        assert chat.wait_before_retry(60, 1.0, None) == pytest.approx(75.0, abs=15.0)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("", None), ("Wed, 21 Oct 2015 07:28:00 GMT", None), ("nan", None), ("-1", None)],
)
def test_retry_after_is_read_where_it_is_a_number(chat: Any, header: str, seconds: float | None) -> None:
    assert chat.refusal(429, "", {"Retry-After": header}).retry_after == seconds


@pytest.mark.parametrize(
    ("status", "body", "code", "retryable"),
    [
        (400, '{"error": {"message": "m", "code": "context_length_exceeded"}}', "chat_context_too_long", False),
        (400, '{"object": "error", "message": "maximum context length is 4096"}', "chat_context_too_long", False),
        (400, '{"error": {"type": "exceed_context_size_error"}}', "chat_context_too_long", False),
        (400, '{"message": "longer than the maximum model length of 8"}', "chat_context_too_long", False),
        (413, '{"error": {"message": "prompt is too long: 9 tokens"}}', "chat_context_too_long", False),
        (404, "no context window here", "chat_not_found", False),
        (403, "", "chat_unauthorized", False),
        (422, '{"detail": [{"loc": ["body"]}]}', "chat_refused", False),
        (301, "", "chat_refused", False),
        (408, "", "chat_refused", True),
        (502, "<html>", "chat_server_error", True),
    ],
)
def test_refusals_of_many_servers_are_understood(chat: Any, status: int, body: str, code: str, retryable: bool) -> None:
    error = chat.refusal(status, body, {})
    assert (error.code, error.retryable) == (code, retryable)


# -- server-sent events ------------------------------------------------------------------------------------------------

EVENTS = (
    'data: {"a": "é漢🐾"}\n\n: a comment\n\ndata:two\ndata:  lines\r\n\r\nevent: x\nid: 1\n\ndata\n\rdata: [DONE]\n\n'
)
PARSED = ['{"a": "é漢🐾"}', "two\n lines", "", "[DONE]"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_are_the_same_however_they_are_cut(chat: Any, end: str) -> None:
    stream = re.sub(r"\r\n|\n|\r", "\n", EVENTS).replace("\n", end).encode()
    for first in range(len(stream) + 1):
        for second in {first, min(first + 1, len(stream)), len(stream)}:
            parser = chat.EventParser()
            pieces = (stream[:first], stream[first:second], stream[second:], b"\n")
            assert [event for piece in pieces for event in parser.feed(piece)] == PARSED, (first, second)
    parser = chat.EventParser()
    assert [event for byte in stream + b"\n" for event in parser.feed(bytes([byte]))] == PARSED


def test_an_event_is_one_when_its_empty_line_is_there(chat: Any) -> None:
    parser = chat.EventParser()
    assert parser.feed(b"\xef\xbb\xbfdata: a") == []  # a byte order mark is allowed
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\ndata: b\n") == ["a"]
    assert parser.feed(b"\xff\n: c\n") == []
    assert parser.feed(b"\n") == ["b"]


def message(chat: Any, *deltas: dict[str, Any]) -> ActionMessage:
    answer = chat.Answer()
    for delta in deltas:
        answer.add({"choices": [{"delta": delta}]})
    said: ActionMessage = answer.message()
    return said


def test_an_answer_grows_by_its_chunks(chat: Any) -> None:
    assert message(chat, {"role": "assistant", "content": None}, {"content": "a"}, {}, {"content": "b"}).content == "ab"
    # The halves of a character, and one half alone, which no request could hold.
    assert message(chat, {"content": "\ud83d"}, {"content": "\udc3e"}).content == "🐾"
    assert message(chat, {"content": "\ud83d"}).content == "\ufffd"
    said = message(chat, {"reasoning_content": "Well,"}, {"reasoning_content": " well."}, {"content": "So."})
    assert (said.content, said.metadata["reasoning"]) == ("So.", "Well, well.")
    said = message(chat, {"content": "<think>a</th"}, {"content": "ink>\n\nb</think>"})
    assert (said.content, said.metadata["reasoning"]) == ("b</think>", "a")


def test_tool_calls_grow_by_their_index(chat: Any) -> None:
    first = {"index": 0, "id": "x", "function": {"name": "appworld", "arguments": ""}}
    second = {"index": 1, "function": {"name": "b", "arguments": "{}"}}
    more = [{"index": 0, "function": {"arguments": text}} for text in ('{"code":', ' "1"}')]
    said = message(chat, *({"tool_calls": [call]} for call in (first, second, *more)))
    assert [(call.id, call.name, call.arguments) for call in said.tool_calls] == [
        ("x", "appworld", '{"code": "1"}'),
        ("call_1", "b", "{}"),
    ]


# -- what the model gets to see ----------------------------------------------------------------------------------------


def test_a_conversation_in_the_form_of_endpoints(react: Any) -> None:
    calls = [ToolCall(id="a", name="appworld", arguments='{"code": "1"}'), ToolCall(id="b", name="x", arguments="{")]
    said: list[Message] = [
        StateMessage(role=Role.SYSTEM, content="s"),
        StateMessage(content="u"),
        ActionMessage(content="think"),
        StateMessage(content="o"),
        ActionMessage(tool_calls=calls),
        StateMessage(content="p"),
        ActionMessage(),
        StateMessage(content="q"),
    ]
    assert react.to_chat(said) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "think"},
        {"role": "user", "content": "o"},
        {
            "role": "assistant",
            "content": "(nothing)",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "appworld", "arguments": '{"code": "1"}'}},
                {"id": "b", "type": "function", "function": {"name": "x", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "p"},
        {"role": "tool", "tool_call_id": "b", "content": "Not run."},
        {"role": "assistant", "content": "(nothing)"},
        {"role": "user", "content": "q"},
    ]


def conversation(*observations: str) -> list[dict[str, Any]]:
    chat = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "task"}]
    for observation in observations:
        chat += [{"role": "assistant", "content": "a" * 100}, {"role": "user", "content": observation}]
    return chat


def test_what_fits_is_left_as_it_is(context: Any) -> None:
    chat = conversation("x" * 5000, "y" * 5000)
    assert context.fit(chat, context.size(chat)) == chat
    assert context.fit(conversation(), 1) == conversation()


def test_the_oldest_observations_are_cut_first(context: Any) -> None:
    chat = conversation(*["x" * 2000] * 3)
    before = json.dumps(chat)
    fitted = context.fit(chat, 6000)
    assert context.size(fitted) <= 6000
    assert [len(fitted[at]["content"]) < 2000 for at in (3, 5, 7)] == [True, False, False]
    assert json.dumps(chat) == before  # it is the trajectory's
    fitted = context.fit(chat, 3200)  # a quarter of it for each
    quarter = "x" * 400 + "\n[… 1200 characters …]\n" + "x" * 400
    assert [fitted[at]["content"] for at in (3, 5, 7)] == [quarter] * 3
    fitted = context.fit(chat, 1550)
    assert context.size(fitted) <= 1550
    stub = "x" * 150 + "\n[… 75 characters …]\n" + "x" * 150
    assert len(fitted[3]["content"]) < len(fitted[7]["content"])
    assert fitted[3]["content"].startswith(stub[:151])
    assert [message["role"] for message in fitted] == [message["role"] for message in chat]


def test_then_the_oldest_turns_are_left_out_but_not_the_last(context: Any) -> None:
    chat = conversation(*["x" * 250] * 10, "y" * 250)
    fitted = context.fit(chat, 1200)
    assert context.size(fitted) <= 1200 + 50
    assert fitted[0] == chat[0]
    assert re.fullmatch(r"task\n\n\[Earlier turns left out here: \d\]", fitted[1]["content"])
    assert fitted[2:] == chat[-len(fitted[2:]) :]
    least = context.fit(chat, 1)
    assert least[2:] == chat[-2:]
