"""The synchronous twin: the same client for threads, on a real server, and that it survives what threads meet.

No test measures time: what must not hang would run into the time limit.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ENVS, _session_processes, serve_command

import aioenv.client
import aioenv.client.session
from aioenv.client.sync import EnvClient
from aioenv.client.sync_session import Session
from aioenv.errors import CallFailed
from aioenv.schema import ActionMessage, Message

FAST: dict[str, Any] = {"min_backoff": 0.0, "max_backoff": 0.0}


@pytest.fixture(scope="module", autouse=True)
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    envs = ("--env", "echo", "--env", "odd", "--env-dir", str(ENVS))
    with serve_command(*envs, "--scratch", str(tmp_path_factory.mktemp("scratch"))) as (url, server):
        _session_processes.add(server.pid)
        assert EnvClient(url).ready()  # which also starts the clients' thread, before files are counted
        yield url


@pytest.fixture
def client(url: str) -> Iterator[EnvClient]:
    with EnvClient(url, **FAST) as client:
        yield client
    wait_until(lambda: living(url) == [])


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """Takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def address(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def nobody() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return address(probe)


def living(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/instances") as reply:
        return [line["instance_id"] for line in json.load(reply)]


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def connections(url: str) -> int:
    """That this process has to the address."""
    mine = [one for one in psutil.net_connections("tcp") if one.pid == os.getpid() and one.raddr]
    return sum(one.raddr.port == int(url.rsplit(":", 1)[1]) and one.status == "ESTABLISHED" for one in mine)


def run(code: str, *args: str) -> str:
    """What a script prints. It must end by itself, without a word on its standard error."""
    whole = f"import sys\nfrom aioenv.client.sync import EnvClient\n{code}"
    command = [sys.executable, "-W", "error", "-c", whole, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


# ---- the same as the asynchronous one


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    ("twin", "original"),
    [(EnvClient, aioenv.client.EnvClient), (Session, aioenv.client.session.Session)],
)
def test_names_arguments_and_defaults_are_the_same(twin: type, original: type) -> None:
    names = {name for name in vars(original) if not name.startswith("_")}
    attributes = {"env_type", "task_id", "instance_id", "state", "done", "reward", "error", "trajectory"}
    assert {name for name in vars(twin) if not name.startswith("_")} - attributes == names
    for name in {"__init__", *names}:
        one, other = vars(twin)[name], vars(original)[name]
        assert isinstance(one, property) == isinstance(other, property)
        if not isinstance(one, property):
            assert not inspect.iscoroutinefunction(one)
            assert parameters(one) == parameters(other), name


def test_it_is_called_as_agentevolver_calls_its_own(url: str, client: EnvClient) -> None:
    """By the names and the positions that its task manager, its worker and its agent flow use; it never closes one."""
    env = EnvClient(base_url=url)
    assert env.get_env_profile("echo", "train", None) == env.get_env_profile(env_type="echo", split="train")
    created = env.create_instance(env_type="echo", task_id="t", instance_id="mine", params={"is_open_query": False})
    assert isinstance(created["state"], list)
    assert [message["role"] for message in created["state"]] == ["system", "user"]
    assert created["info"]["instance_id"] == "mine"
    stepped = env.step("mine", {"content": "done", "role": "assistant"})
    (state,) = stepped["state"]
    state.pop("tool_calls", None)
    assert (state["role"], state["content"], stepped["is_terminated"]) == ("user", "done", True)
    assert env.get_tools_info("mine", messages={}, params={}) is not None
    assert env.evaluate("mine", params={"sparse": True}) >= 1
    assert env.release_instance("mine") is True
    assert env.release_instance("mine") is False
    assert (env.base_url, env.timeout > 150) == (url, True)


def test_a_session_plays_an_episode(url: str, client: EnvClient) -> None:
    with client.session("echo", "t", params={"a": 1}) as session:
        assert living(url) == [session.instance_id]
        assert (session.env_type, session.task_id, len(session.state)) == ("echo", "t", 2)
        actions: list[Any] = ["hello", {"role": "assistant", "content": "again"}, ActionMessage(content="done")]
        for action in actions:
            assert session.done is False
            session.step(action)
        assert session.state[0]["content"] == "done"
        assert (session.done, session.reward, session.error) == (True, 1.0, None)
        assert session.step("more")["info"]["fallback"] is True
        score = session.evaluate(sparse=True)
        assert (score, score.fallback) == (1.0, False)
    wait_until(lambda: living(url) == [])
    assert [step.action.content for step in session.trajectory.steps] == ["hello", "again", "done"]
    assert [message.content for message in session.messages()][-2:] == ["done", "done"]
    session.fail("deadline", "too late")
    assert session.trajectory.info["error"]["code"] == "deadline"


def test_a_session_is_branched_and_goes_back(url: str, client: EnvClient) -> None:
    with client.session("echo", "t") as session:
        session.step("one")
        saved = session.checkpoint()
        with session.branches(2) as branches:
            assert len(living(url)) == 3
            for number, branch in enumerate(branches):
                assert branch.step(f"branch {number}")["info"]["step"] == 2
                assert [step.action.content for step in branch.trajectory.steps] == ["one", f"branch {number}"]
        assert living(url) == [session.instance_id]
        session.step("done")
        assert session.done is True
        session.restore(saved)
        assert (session.done, len(session.trajectory.steps)) == (False, 1)
        assert session.step("two")["info"]["step"] == 2
        assert len(client.fork(session.instance_id, instance_ids=["a"])) == 1
        assert (
            client.restore(session.instance_id)["checkpoint"]
            == client.restore(session.instance_id, saved)["checkpoint"]
        )
        assert client.release_instance("a") is True
    assert client.wait_ready() is True


def test_a_session_is_released_when_its_block_raises(url: str, client: EnvClient) -> None:
    session = client.session("echo", "t")
    with pytest.raises(ValueError, match="mine"), session:
        raise ValueError("mine" if living(url) == [session.instance_id] else "it is not there")
    wait_until(lambda: living(url) == [])


def test_failures_are_fallbacks_or_exceptions_as_one_asks(nobody: str, url: str) -> None:
    with EnvClient(nobody, **FAST) as client:
        assert client.get_env_profile("echo") == []
        assert client.get_tools_info("i1") is None
        assert client.release_instance("i1") is False
        assert client.evaluate("i1").fallback is True
        assert client.create_instance("echo", "t", "mine")["info"]["error"]["code"] == "connection_failed"
        assert client.step("", "wrong", max_retry=0)["info"]["error"]["code"] == "bad_request"  # type: ignore[arg-type]
        assert (client.healthz(), client.ready()) == (False, False)
        assert client.stats.to_dict()["failures/connection_failed"] == 5
    with EnvClient(url, on_error="raise") as client:
        with pytest.raises(CallFailed, match="i1") as caught:
            client.step("i1", {"content": "x"})
        assert (caught.value.code, caught.value.status) == ("unknown_instance", 404)
        with pytest.raises(CallFailed, match="no such task"), client.session("odd", "missing"):
            raise AssertionError("not reached")
    with pytest.raises(ValueError):
        EnvClient("ftp://host")


def test_64_threads_share_a_client(url: str, client: EnvClient) -> None:
    together = threading.Barrier(64)

    def play(number: int) -> list[str]:
        together.wait()
        with client.session("echo", f"t{number % 4}") as session:
            return [session.step(f"{number} {turn}")["state"][0]["content"] for turn in range(3)]

    with ThreadPoolExecutor(64) as threads:
        said = list(threads.map(play, range(64)))
    assert said == [[f"{number} {turn}" for turn in range(3)] for number in range(64)]
    assert client.stats.fallbacks == 0
    assert client.stats.calls == 64 * 5


async def test_a_call_in_a_running_loop_s_thread_blocks_and_returns(url: str) -> None:
    with EnvClient(url) as client:
        assert client.ready() is True
        with client.session("echo", "t") as session:
            assert session.step("done")["is_terminated"] is True
    assert await asyncio.to_thread(EnvClient(url).healthz) is True


def test_a_copy_has_the_same_options(url: str) -> None:
    client = EnvClient(url, timeout=7, timeout_jitter=(0, 0), on_error="raise")
    for other in (pickle.loads(pickle.dumps(client)), copy.deepcopy(client)):
        with other:
            assert (other.base_url, other.timeout, other.healthz()) == (url, 7, True)
            with pytest.raises(CallFailed):
                other.step("")


def test_importing_it_imports_neither_server_nor_pool_nor_envs_nor_jinja2() -> None:
    bad = "{'jinja2', 'appworld', 'aioenv.server', 'aioenv.pool', 'aioenv.envs', 'multiprocessing', 'tqdm'}"
    assert run(f"print(sorted({bad} & set(sys.modules)))") == "[]\n"


# ---- interrupted, closed, forgotten, at the exit


def interrupt_when(ready: Callable[[], object]) -> threading.Thread:
    """Press Ctrl-C, once `ready` returns."""
    main = threading.get_ident()

    def press() -> None:
        ready()
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def test_an_interrupted_call_is_cancelled_and_its_connection_closed(deaf: socket.socket) -> None:
    taken: list[socket.socket] = []

    def called() -> None:
        taken.append(deaf.accept()[0])
        assert taken[0].recv(1_000_000)

    with EnvClient(address(deaf)) as client:
        thread = interrupt_when(called)
        with pytest.raises(KeyboardInterrupt):
            client.step("i1", {"content": "x"})
        thread.join()
        with taken[0]:
            while taken[0].recv(1_000_000):  # until the client hangs up
                pass
        assert client.stats.fallbacks == 0


def test_an_interrupted_create_of_a_session_leaves_no_instance(url: str, client: EnvClient) -> None:
    thread = interrupt_when(lambda: wait_until(lambda: living(url) != []))
    with pytest.raises(KeyboardInterrupt), client.session("odd", "t", params={"sleep": 1}):
        raise AssertionError("not reached")
    thread.join()
    wait_until(lambda: living(url) == [])


def test_an_interrupted_rollout_leaves_no_instance(url: str, client: EnvClient) -> None:
    asked = threading.Event()
    go_on = threading.Event()

    def agent(messages: list[Message]) -> str:
        asked.set()
        go_on.wait()
        return "done"

    thread = interrupt_when(asked.wait)
    with pytest.raises(KeyboardInterrupt):
        list(client.rollout(agent, ["a", "b"], env_type="echo"))
    thread.join()
    wait_until(lambda: living(url) == [])
    go_on.set()


def test_closing_ends_the_calls_in_flight_and_those_that_wait_to_try_again(deaf: socket.socket, nobody: str) -> None:
    for where in (address(deaf), nobody):
        client = EnvClient(where, min_backoff=1e6, max_backoff=1e6)
        with ThreadPoolExecutor(8) as threads:
            calls = [threads.submit(client.step, f"i{number}") for number in range(6)]
            wait_until(lambda client=client: client.stats.tries == 6 or connections(address(deaf)) == 6)  # type: ignore[misc]
            closers = [threads.submit(client.close) for _ in range(2)]
            codes = {call.result()["info"]["error"]["code"] for call in calls}
            assert [closer.result() for closer in closers] == [None, None]
        client.close()
        assert codes <= {"client_closed", "connection_failed"}
        assert client.step("i1")["info"]["error"]["code"] == "client_closed"
        assert client.healthz() is False


def test_a_client_that_nobody_has_any_more_closes_its_connections(url: str) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.client = EnvClient(url, on_failure=self.failed)  # a circle

        def failed(self, route: str, subject: str, error: CallFailed) -> None: ...

    before = connections(url)
    trainers = [Trainer() for _ in range(5)]
    assert [trainer.client.healthz() for trainer in trainers] == [True] * 5
    assert connections(url) > before
    gone = [weakref.ref(trainer.client) for trainer in trainers]
    del trainers
    gc.collect()
    assert [reference() for reference in gone] == [None] * 5
    wait_until(lambda: connections(url) <= before)


def test_the_interpreter_exits_without_a_word_whatever_was_left_open(url: str, deaf: socket.socket) -> None:
    code = """
import threading
from aioenv.client.sync import EnvClient
url, deaf = sys.argv[1:]
idle = EnvClient(url)
print(idle.healthz())
EnvClient(url)
busy = EnvClient(deaf)
for _ in range(4):
    threading.Thread(target=busy.step, args=("i1",), daemon=True).start()
def again_and_again():
    while True:
        idle.healthz()
threading.Thread(target=again_and_again, daemon=True).start()
threading.Thread(target=lambda: list(busy.rollout(lambda messages: "done", ["t"])), daemon=True).start()
played = idle.rollout(lambda messages: threading.Event().wait() if "slow" in messages[1].content else "done",
                      ["quick", "slow"], env_type="echo")
print(next(played).task_id)
"""
    assert run(code, url, address(deaf)) == "True\nquick\n"
    wait_until(lambda: living(url) == [])


def test_the_interpreter_exits_without_a_word_with_idle_connections(url: str) -> None:
    assert run("client = EnvClient(sys.argv[1])\nprint(client.healthz())", url) == "True\n"


def test_handlers_of_the_exit_may_make_calls(url: str) -> None:
    code = """
import atexit
client = EnvClient(sys.argv[1])
atexit.register(client.close)
atexit.register(lambda: print(client.healthz()))
client.healthz()
"""
    assert run(code, url) == "True\n"


def test_a_call_after_the_exit_began_is_a_fallback(url: str) -> None:
    code = """
import atexit, logging, sys
def late():
    print(client.step("i1")["info"]["error"]["code"], client.healthz())
    client.close()
atexit.register(late)
from aioenv.client.sync import EnvClient
logging.getLogger("aioenv.client").addHandler(logging.NullHandler())
client = EnvClient(sys.argv[1])
print(client.healthz())
"""
    done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\nclient_closed False\n", "")


def test_without_a_thread_to_be_had_calls_are_answered_as_promised(url: str) -> None:
    code = """
import logging, threading
def start(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start, start = start, threading.Thread.start
logging.getLogger("aioenv.client").addHandler(logging.StreamHandler(sys.stdout))
client = EnvClient(sys.argv[1], on_error="raise")
try:
    client.step("i1")
except Exception as error:
    print(type(error).__name__, error.code)
with EnvClient(sys.argv[1]).session("echo", "t") as session:
    print(session.error["code"], session.step("x")["info"]["fallback"])
threading.Thread.start = start
print(client.healthz())
"""
    said = run(code, url).splitlines()
    assert "can't start new thread" in said[0]
    assert "CallFailed client_closed" in said
    assert "client_closed True" in said
    assert said[-1] == "True"


def test_a_call_from_the_clients_own_loop_is_told_so(
    url: str, nobody: str, client: EnvClient, caplog: pytest.LogCaptureFixture
) -> None:
    failing = EnvClient(nobody, tries=1, on_failure=lambda route, subject, error: client.close())
    assert failing.evaluate("i1").fallback is True
    assert "from its own event loop's thread" in caplog.text

    async def agent(messages: list[Message]) -> str:
        assert await asyncio.to_thread(client.healthz)
        client.healthz()
        return "done"

    (played,) = client.rollout(agent, ["t"], env_type="echo")
    assert "from its own event loop's thread" in played.info["error"]["message"]


def test_what_ends_the_loop_of_others_does_not_end_the_clients(client: EnvClient) -> None:
    async def agent(messages: list[Message]) -> str:
        sys.exit(3)

    with pytest.raises(SystemExit):
        list(client.rollout(agent, ["t"], env_type="echo"))
    assert client.healthz() is True


# ---- forks


def test_a_forked_process_has_a_client_of_its_own_and_harms_the_parent_s(url: str) -> None:
    code = """
import multiprocessing, threading
client = EnvClient(sys.argv[1], max_backoff=3, tries=1)
session = client.session("odd", "t").__enter__()
session.step("history")
in_flight = threading.Thread(target=lambda: print(session.step("sleep 2")["state"][0]["content"]))
in_flight.start()

def child(pipe):
    with client.session("echo", "u") as mine:
        pipe.send((mine.step("done")["is_terminated"], client.stats.calls, client.timeout))

pipes, children = [], []
context = multiprocessing.get_context("fork")
for _ in range(3):
    near, far = context.Pipe()
    children.append(context.Process(target=child, args=(far,)))
    children[-1].start()
    pipes.append(near)
said = [pipe.recv() for pipe in pipes]
print([one[:2] for one in said], len({client.timeout, *(one[2] for one in said)}))
for process in children:
    process.join()
    assert process.exitcode == 0
in_flight.join()
print(session.step("history")["state"][0]["content"], client.stats.fallbacks)
session.__exit__()
"""
    assert run(code, url) == "[(True, 2), (True, 2), (True, 2)] 4\nslept\nhistory sleep history 0\n"
    wait_until(lambda: living(url) == [])


def test_a_fork_that_ends_as_an_interpreter_does_touches_nothing_of_the_parent_s(url: str, deaf: socket.socket) -> None:
    """It finalises copies of all that the parent has open."""
    code = """
import gc, os, threading, time
url, deaf = sys.argv[1:]
client, busy = EnvClient(url), EnvClient(deaf)
session = client.session("odd", "t").__enter__()
threading.Thread(target=busy.evaluate, args=("i1",), daemon=True).start()
played = client.rollout(lambda messages: "done", ["a", "b"], env_type="echo", concurrency=1)
next(played)
def say(text):  # in one piece, as two processes do
    os.write(1, f"{text}\\n".encode())
call = threading.Thread(target=lambda: say(session.step("sleep 1")["state"][0]["content"]))
call.start()
while client.stats.calls < 6:
    time.sleep(0.01)
pid = os.fork()
if pid == 0:
    try:
        next(played)
    except RuntimeError as error:
        say("begin it anew" in str(error))
    say(session.step("history")["info"]["step"])
    del client, busy, played, session
    gc.collect()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
call.join()
print(session.step("history")["info"]["step"], [episode.task_id for episode in played])
session.__exit__()
"""
    said = run(code, url, address(deaf)).splitlines()
    assert sorted(said[:-1]) == ["2", "True", "slept"]
    assert said[-1] == "3 ['b']"
    wait_until(lambda: living(url) == [])


def test_a_forked_process_holds_no_connection_of_the_parent_s(deaf: socket.socket) -> None:
    """Else a server wouldn't see the parent hang up."""
    code = """
import os, sys, threading
from aioenv.client.sync import EnvClient
client = EnvClient(sys.argv[1])
call = threading.Thread(target=client.step, args=("i1",))
call.start()
sys.stdin.readline()
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
client.close()
call.join()
"""
    command = [sys.executable, "-c", code, address(deaf)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None
        with deaf.accept()[0] as taken:
            assert taken.recv(1_000_000)
            process.stdin.write("fork\n")
            process.stdin.flush()
            while taken.recv(1_000_000):
                pass
        process.stdin.close()
    assert process.returncode == 0


def test_a_closed_client_is_closed_in_a_forked_process_too(url: str) -> None:
    code = """
import logging, os
logging.getLogger("aioenv.client").addHandler(logging.NullHandler())
client = EnvClient(sys.argv[1])
client.healthz()
client.close()
if os.fork() == 0:
    print(client.step("i1")["info"]["error"]["code"], flush=True)
    client.close()
    os._exit(0)
os.wait()
"""
    assert run(code, url) == "client_closed\n"


def test_forked_processes_do_not_wait_alike() -> None:
    code = """
import os
from aioenv.client.call import uniform
for _ in range(3):
    if os.fork() == 0:
        print(uniform(0, 1), flush=True)
        os._exit(0)
    os.wait()
"""
    assert len(set(run(code).split())) == 3


# ---- rollouts


def test_plain_agents_run_side_by_side(client: EnvClient) -> None:
    together = threading.Barrier(4)

    def agent(messages: list[Message]) -> str:
        together.wait()
        return "done" if len(messages) > 3 else "hello"

    tasks = [f"t{number}" for number in range(8)]
    played = list(client.rollout(agent, tasks, env_type="echo", concurrency=4, progress=True))
    assert sorted(episode.task_id for episode in played) == tasks
    for episode in played:
        assert [step.action.content for step in episode.steps] == ["hello", "done"]
        assert (episode.reward.value, "error" in episode.info) == (1.0, False)


class Counting:
    def __init__(self, task: str) -> None:
        self.task = task
        self.turns = 0

    def __call__(self, messages: list[Message]) -> str:
        self.turns += 1
        return f"{self.task} {self.turns}"


class AsyncCounting(Counting):
    async def __call__(self, messages: list[Message]) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__call__(messages)


@pytest.mark.parametrize("kind", [Counting, AsyncCounting, lambda task: lambda messages: AsyncCounting(task)(messages)])
def test_agents_of_any_kind_can_be_made_for_each_task(client: EnvClient, kind: Any) -> None:
    played = list(client.rollout(kind, ["a", "b"], env_type="echo", make_agent=True, max_steps=2))
    assert sorted(episode.task_id for episode in played) == ["a", "b"]
    for episode in played:
        assert episode.steps[0].action.content == f"{episode.task_id} 1"


def test_one_failing_agent_ends_no_other(client: EnvClient) -> None:
    def agent(messages: list[Message]) -> Any:
        task = messages[1].content
        if "raises" in task:
            raise RuntimeError("the agent failed")
        if "stops" in task:
            return next(iter([]))
        if "exits" in task:
            sys.exit(3)
        if "slow" in task:
            time.sleep(5)
        return None if "gives up" in task else "done"

    tasks = ["fine", "raises", "stops", "exits", "gives up", "slow"]
    played = client.rollout(agent, tasks, env_type="echo", episode_timeout=3.0)
    errors = {episode.task_id: (episode.info.get("error") or {}).get("code") for episode in played}
    assert errors == {
        "fine": None,
        "raises": "agent_error",
        "stops": "agent_error",
        "exits": "agent_error",
        "gives up": None,
        "slow": "deadline",
    }


def test_tasks_are_read_by_the_caller_as_episodes_begin(url: str, client: EnvClient) -> None:
    read = []

    def tasks() -> Iterator[str]:
        for number in itertools.count():
            read.append((threading.current_thread(), client.healthz()))  # a call, which the loop's thread couldn't make
            yield f"t{number}"

    episodes = client.rollout(lambda messages: "done", tasks(), env_type="echo", concurrency=3)
    played = [next(episodes).task_id for _ in range(7)]
    episodes.close()
    assert len(set(played)) == 7
    assert set(read) == {(threading.main_thread(), True)}
    assert len(read) <= 7 + 3
    wait_until(lambda: living(url) == [])


def test_tasks_that_raise_end_the_rollout_and_leave_nothing(url: str, client: EnvClient) -> None:
    def tasks() -> Iterator[str]:
        yield "t"
        raise ValueError("no more tasks")

    with pytest.raises(ValueError, match="no more tasks"):
        list(client.rollout(lambda messages: "done", tasks(), env_type="echo", concurrency=1))
    wait_until(lambda: living(url) == [])


def test_wrong_options_of_a_rollout_are_told(client: EnvClient) -> None:
    for options in ({"concurrency": 0}, {"max_steps": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            list(client.rollout(lambda messages: "done", ["t"], **options))


def test_failures_are_logged_as_by_the_other(nobody: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, "aioenv.client"), EnvClient(nobody, tries=2, **FAST) as client:
        client.evaluate("i1")
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "/evaluate (instance_id i1) failed (2 tries" in caplog.text
