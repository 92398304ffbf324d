"""Episodes against a server that is being harmed, every outcome checked: what test_chaos.py and soak.py run.

The server must serve `count` of tests/envs. While episodes go on, worlds, templates and job processes are killed, and
clients hang up and send the same request again. The server must neither lose nor repeat an action, nor mistake one
caller for another, and must say why whenever it fails. First come the rules, which are pure; then finding processes;
then the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

REQUEST_LIMIT = 30.0  # seconds that a reply may take
RELOAD_LIMIT = 30.0  # seconds that a template may take to be there again
CLEAR_LIMIT = 10.0  # seconds that ended instances may stay listed
JOB_LIMIT = 10.0  # seconds that a job process may take to be seen
MOST_STEPS = 8  # of an episode
MOST_VIOLATIONS = 100  # then a run ends early
TASKS = [f"t{number}" for number in range(1, 25)]  # of CountEnv

# How a call is made, and how often: once; given up before its reply and sent again; sent twice, at once or in a row.
MANNERS = {"plain": 60, "hang up": 20, "at once": 10, "in a row": 10}
# Seconds between two kills of a kind, on average.
PAUSES = {"world": 0.2, "group": 1.0, "template": 5.0, "job": 3.0}
# A group template older than this is made and rests.
RESTING_AGE = 1.0

CODES = {
    400: {"bad_request"},
    401: {"unauthorized"},
    404: {"unknown_env", "unknown_task", "unknown_instance"},
    409: {"instance_conflict"},
    410: {"instance_gone"},
    413: {"too_large"},
    500: {"env_error"},
    503: {"at_capacity", "starting", "draining"},
    504: {"step_timeout"},
}


# -- what must hold ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """What came for one request. `status` is 0 where nothing came, and `body` says why."""

    status: int
    body: Any
    retry_after: str | None
    sent: float
    came: float

    @property
    def success(self) -> Any:
        return _get(self.body, "success")

    @property
    def data(self) -> Any:
        return _get(self.body, "data")

    @property
    def replayed(self) -> bool:
        return _get(_get(self.data, "info"), "replayed") is True

    @property
    def error(self) -> Any:
        return _get(self.body, "error")


def _get(value: Any, key: str) -> Any:
    """None where there is no such key, or nothing that could have one: a reply may be anything."""
    return value.get(key) if isinstance(value, dict) else None


@dataclass
class Call:
    """One logical call: all its requests carry the same `request_id`."""

    route: str
    instance: str
    body: dict[str, Any]
    expected: Any  # the data of a good reply, but for what `info` holds beyond it
    gone: bool = False  # whether the caller was told before that the instance is gone
    began: float = 0.0
    requests: int = 0
    replies: list[Reply] = field(default_factory=list)

    @property
    def good(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.status == 200]

    @property
    def all_good(self) -> bool:
        return len(self.good) == len(self.replies)


@dataclass
class Harm:
    """What was killed, and when."""

    worlds: dict[str, float] = field(default_factory=dict)  # by instance
    parents: list[float] = field(default_factory=list)  # templates and group templates
    # From the kill of the template until it was there again; the end is infinite as long as it is not.
    reloads: list[tuple[float, float]] = field(default_factory=list)

    def of_world(self, call: Call, reply: Reply) -> bool:
        """Whether a world of the instance was killed before the reply came."""
        return self.worlds.get(call.instance, math.inf) <= reply.came

    def of_parent(self, call: Call, reply: Reply) -> bool:
        """Whether what worlds are forked from was killed meanwhile. What it has just forked may die with it."""
        return any(call.began <= killed <= reply.came for killed in self.parents)

    def of_template(self, call: Call, reply: Reply) -> bool:
        """Whether there was no template at any time meanwhile."""
        return any(begin <= reply.came and call.began <= end for begin, end in self.reloads)


@dataclass
class ChaosReport:
    """What was done and seen. A violation is a sentence."""

    episodes: int = 0
    created: int = 0  # as told by a good reply, an instance once
    released: int = 0  # as told by `success` true
    dead: int = 0  # killed, as told by the release that came too late
    steps: int = 0  # that were answered, an action once
    hang_ups: int = 0
    duplicates: int = 0
    replays: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def check_call(call: Call, harm: Harm) -> Iterator[str]:
    """What is wrong with the replies to a call."""
    who = f"{call.instance}: /{call.route}"
    for reply in call.replies:
        check = _wrong_with_success if reply.status == 200 else _wrong_with_failure
        wrong = check(call, reply, harm)
        if wrong:
            yield f"{who}: {wrong}"
    good = call.good
    for reply in good[1:]:
        if _without_replayed(reply.data) != _without_replayed(good[0].data):
            yield f"{who}: two replies to one request_id differ: {good[0].data} and {reply.data}"
    if call.route == "step" and good:
        runs = sum(not reply.replayed for reply in good)
        if runs > 1:
            yield f"{who}: expected info.replayed in all replies to a request_id but one, seen {runs} without"
        if runs == 0 and len(good) == call.requests:
            yield f"{who}: expected one reply to a request_id without info.replayed, seen none"


def _wrong_with_success(call: Call, reply: Reply, harm: Harm) -> str | None:
    if _known(reply.data, call.expected) != call.expected or not isinstance(reply.body, dict):
        return f"expected the data {call.expected}, seen {reply.body}"
    killed = harm.of_world(call, reply)
    allowed = {True}
    if call.gone:
        allowed = {False} if call.route == "release" else set()
    elif call.route == "release" and killed:
        allowed = {True, False}  # its end may be noticed before the release, or after
    if reply.success not in allowed:
        return f"it is {'gone' if call.gone else 'killed' if killed else 'alive'}, yet seen {reply.body}"
    return None


def _known(data: Any, expected: Any) -> Any:
    """`data` without what its `info` holds beyond the expected."""
    info = _get(data, "info")
    if not isinstance(info, dict) or not isinstance(expected, dict):
        return data
    return {**data, "info": {key: value for key, value in info.items() if key in expected["info"]}}


def _without_replayed(data: Any) -> Any:
    info = _get(data, "info")
    if not isinstance(info, dict):
        return data
    return {**data, "info": {key: value for key, value in info.items() if key != "replayed"}}


def _wrong_with_failure(call: Call, reply: Reply, harm: Harm) -> str | None:
    """A failure must have the protocol's shape, and harm that was done must be its reason."""
    shape = wrong_shape(reply)
    if shape:
        return shape
    code, message = reply.error["code"], reply.error["message"]
    if code == "starting" and call.route == "create":
        return None if harm.of_template(call, reply) else f"told to come back while the template was there: {message}"
    if code == "instance_gone":
        harmed = harm.of_world(call, reply)
    elif code == "env_error" and call.route == "create":
        harmed = harm.of_world(call, reply) or harm.of_parent(call, reply)
    else:
        return f"expected success, seen {reply.status} {code}: {message}"
    if not harmed:
        return f"nobody harmed it, yet seen {reply.status} {code}: {message}"
    return None if "SIGKILL" in message else f"killed by SIGKILL, but told: {message}"


def wrong_shape(reply: Reply) -> str | None:
    """What makes a reply no failure of the protocol's."""
    if reply.status == 0:
        return f"no reply after {reply.came - reply.sent:.1f} s: {reply.body}"
    code = _get(reply.error, "code")
    if code not in CODES.get(reply.status, ()):
        return f"expected a failure of the protocol, seen {reply.status} {reply.body}"
    expected = {
        "code": code,
        "message": reply.body.get("detail"),
        "retryable": reply.status == 503,
        "instance_gone": reply.status in (410, 504),
    }
    if reply.success is not False or not isinstance(expected["message"], str) or reply.error != expected:
        return f"expected the error {expected}, seen {reply.body}"
    if reply.status == 503 and not (reply.retry_after or "").isdigit():
        return f"expected a Retry-After, seen {reply.retry_after!r} with {reply.body}"
    return None


def check_ledger(lines: Iterable[str], sent: Mapping[str, bool]) -> Iterator[str]:
    """`sent` has the line of each action, and whether a good reply to it came."""
    times = Counter(lines)
    for line, count in times.items():
        if count > 1:
            yield f"{line}: expected to run at most once, ran {count} times"
        if line not in sent:
            yield f"{line}: ran, but nobody sent it"
    for line, answered in sent.items():
        if answered and line not in times:
            yield f"{line}: was answered, but never ran"


def check_balance(report: ChaosReport) -> Iterator[str]:
    """Each instance ends in one of two ways, as none idles for so long that it is reaped."""
    if report.created != report.released + report.dead:
        yield f"{report.created} were created, but {report.released} released and {report.dead} killed"


# -- harm --------------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """The processes of a server, by what they are."""

    worlds: dict[str, psutil.Process] = field(default_factory=dict)  # by instance
    groups: list[psutil.Process] = field(default_factory=list)
    templates: list[psutil.Process] = field(default_factory=list)
    jobs: list[psutil.Process] = field(default_factory=list)
    all: set[psutil.Process] = field(default_factory=set)


def find(server: psutil.Process) -> Found:
    """By what a process's parent is, and by where it lives."""
    found = Found(all=set(server.children(recursive=True)))
    places: dict[int, Path] = {}
    parents: dict[psutil.Process, int] = {}
    for process in found.all:
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile
            if process.ppid() == server.pid:
                if "spawn_main" in " ".join(process.cmdline()):  # neither the root nor the resource tracker
                    found.jobs.append(process)
                continue
            # In this order: a newborn has its parent's place until it goes to its own.
            places[process.pid] = Path(process.cwd())
            parents[process] = process.ppid()
    for process, parent in parents.items():
        place = places[process.pid]
        if places.get(parent) == place:
            continue
        if place.parent.name == "worlds":
            found.worlds[place.name] = process
        elif place.parent.name == "groups":
            found.groups.append(process)
        elif place.parent.name == "templates":
            found.templates.append(process)
    return found


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass
class Episode:
    """One instance's, as its client knows it."""

    instance: str
    task: str
    actions: int = 0


class Chaos:
    """`play` as often as you like, then `finish`. For a server with the process `pid`."""

    def __init__(self, url: str, pid: int, ledger: Path, worlds: int) -> None:
        self.report = ChaosReport()
        self.seen: set[psutil.Process] = set()  # processes of the server that may live still
        self._url = url
        self._server = psutil.Process(pid)
        self._ledger = ledger
        self._ledger.touch()
        self._worlds = worlds
        self._harm = Harm()
        self._sent: dict[str, bool] = {}
        self._run = uuid.uuid4().hex[:8]
        self._until = 0.0
        self._session: aiohttp.ClientSession | None = None

    async def play(self, seconds: float, harm: bool = True) -> None:
        """Episodes for so long; those that run then are finished. Leaves no connection open."""
        monkeys = {
            "world": self._kill_world,
            "group": self._kill_group,
            "template": self._kill_template,
            "job": self._kill_job,
        }
        timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._session:
            await self._list_tasks()
            self._until = time.monotonic() + seconds
            async with asyncio.TaskGroup() as group:
                for _ in range(self._worlds):
                    group.create_task(self._episodes())
                for kind, act in monkeys.items() if harm else ():
                    group.create_task(self._monkey(kind, act))
            await self._expect_no_instances()

    def finish(self) -> ChaosReport:
        """The report, with what the ledger and the counts tell at the end."""
        with self._ledger.open() as ledger:
            self.report.violations += check_ledger((line.rstrip("\n") for line in ledger), self._sent)
        self.report.violations += check_balance(self.report)
        return self.report

    # -- episodes ----------------------------------------------------------------------------------------------------

    async def _episodes(self) -> None:
        while time.monotonic() < self._until:
            self.report.episodes += 1
            episode = Episode(f"{self._run}-{self.report.episodes}", random.choice(TASKS))
            created = await self._create(episode)
            if created is not None:
                # Where one of two creates failed, it was killed in between: it may be gone, or have been made anew.
                gone = created.all_good and not await self._act(episode)
                await self._release(episode, gone)

    async def _create(self, episode: Episode) -> Call | None:
        """None if it never lived. Tried again, as any client would, while there is no template."""
        params, task = {"ledger": str(self._ledger)}, episode.task
        body = {"task_id": task, "params": params, "request_id": f"{episode.instance}-create"}
        expected = {
            "state": [{"role": "user", "content": f"Task {task}: act."}],
            "reward": 0.0,
            "is_terminated": False,
            "info": {"instance_id": episode.instance, "task_id": task},
        }
        until = time.monotonic() + RELOAD_LIMIT
        while time.monotonic() < until:
            call = await self._make(
                Call("create", episode.instance, body, expected), _any_manner(), give_up_within=0.05
            )
            if call.good:
                self.report.created += 1
                return call
            if any(reply.status != 503 for reply in call.replies):
                return None
            await asyncio.sleep(0.3)
        self._found_wrong([f"{episode.instance}: could not be created within {RELOAD_LIMIT:g} s"])
        return None

    async def _act(self, episode: Episode) -> bool:
        """Steps to its end, and its score; False if it was found gone."""
        steps = random.randint(1, MOST_STEPS)
        for number in range(1, steps + 1):
            if not (await self._step(episode, last=number == steps)).all_good:
                await self._step(episode, last=False, gone=True)
                return False
        body = {"request_id": f"{episode.instance}-evaluate"}
        call = Call("evaluate", episode.instance, body, float(steps))
        return (await self._make(call, _any_manner(), give_up_within=0.01)).all_good

    async def _step(self, episode: Episode, last: bool, gone: bool = False) -> Call:
        episode.actions += 1
        action = f"{episode.instance}.{episode.actions}"
        manner = "plain" if gone else _any_manner()
        sleep = random.choice([0.0, 0.0, random.uniform(0.0, 0.2)]) if manner == "plain" else random.uniform(0.0, 0.2)
        body = {
            "messages": {"role": "assistant", "content": f"done {action}" if last else action},
            "params": {"sleep": sleep},
            "request_id": action if manner != "plain" or random.random() < 0.5 else None,
        }
        content = f"{episode.instance} {action} {episode.actions}"
        expected = {
            "state": [{"role": "user", "content": content, "tool_calls": []}],
            "reward": 0.0,
            "is_terminated": last,
            "info": {"instance_id": episode.instance, "task_id": episode.task, "step": episode.actions},
        }
        line = f"{episode.instance} {action}"
        self._sent[line] = False
        call = await self._make(Call("step", episode.instance, body, expected, gone), manner, give_up_within=sleep)
        self._sent[line] = bool(call.good)
        self.report.steps += bool(call.good)
        return call

    async def _release(self, episode: Episode, gone: bool) -> None:
        call = await self._make(Call("release", episode.instance, {}, None, gone), "plain")
        for reply in call.good:
            self.report.released += reply.success is True
            self.report.dead += reply.success is False

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _make(self, call: Call, manner: str, give_up_within: float = 0.0) -> Call:
        """The call with its replies, which are checked and counted."""
        call.began = time.monotonic()
        first = asyncio.create_task(self._request(call))
        if manner == "hang up":
            await asyncio.wait([first], timeout=random.uniform(0.0, give_up_within))
            first.cancel()
        second = asyncio.create_task(self._request(call)) if manner == "at once" else None
        await asyncio.wait([first])
        if first.cancelled():
            self.report.hang_ups += 1
        if manner in ("hang up", "in a row"):
            second = asyncio.create_task(self._request(call))
        if second is not None:
            await asyncio.wait([second])
            self.report.duplicates += 1
        call.replies = [task.result() for task in (first, second) if task is not None and not task.cancelled()]
        for reply in call.replies:
            self.report.replays += reply.replayed
            if reply.status != 200:
                self.report.failures[f"{reply.status} {_get(reply.error, 'code')}"] += 1
        self._found_wrong(check_call(call, self._harm))
        return call

    async def _request(self, call: Call) -> Reply:
        call.requests += 1
        return await self._fetch("POST", call.route, {"env_type": "count", "instance_id": call.instance, **call.body})

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> Reply:
        assert self._session is not None
        sent = time.monotonic()
        try:
            async with self._session.request(method, f"{self._url}/{path}", json=body) as response:
                data = await response.json()
                return Reply(response.status, data, response.headers.get("Retry-After"), sent, time.monotonic())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return Reply(0, repr(error), None, sent, time.monotonic())

    async def _list_tasks(self) -> None:
        """Answered by a job process, whose death the service hides: of one at a time, as many as are killed."""
        call = Call("get_env_profile", "no instance", {"instance_id": None}, TASKS)
        await self._make(call, "plain")

    async def _expect_no_instances(self) -> None:
        """All are released or killed: none may be listed, after a moment for the latest deaths."""
        until = time.monotonic() + CLEAR_LIMIT
        listed = await self._fetch("GET", "instances")
        while listed.body != [] and time.monotonic() < until:
            await asyncio.sleep(0.1)
            listed = await self._fetch("GET", "instances")
        if listed.body != []:
            self._found_wrong([f"expected no instances at the end, seen {listed.status} {listed.body}"])

    def _found_wrong(self, sentences: Iterable[str]) -> None:
        self.report.violations += sentences
        if len(self.report.violations) >= MOST_VIOLATIONS:
            self._until = 0.0

    # -- monkeys -----------------------------------------------------------------------------------------------------

    async def _monkey(self, kind: str, harm: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.5, 1.5) * PAUSES[kind])
            if time.monotonic() >= self._until:
                return
            await harm()

    async def _find(self) -> Found:
        found = await asyncio.to_thread(find, self._server)
        self.seen = {process for process in self.seen | found.all if process.is_running()}
        return found

    def _kill(self, kind: str, process: psutil.Process) -> bool:
        """psutil makes sure that it is the very process that was found."""
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return False
        self.report.kills[kind] += 1
        return True

    async def _kill_world(self) -> None:
        worlds = (await self._find()).worlds
        if worlds:
            instance = random.choice(list(worlds))
            now = time.monotonic()
            if self._kill("world", worlds[instance]):
                self._harm.worlds[instance] = now

    async def _kill_group(self) -> None:
        old = [group for group in (await self._find()).groups if _age(group) > RESTING_AGE]
        now = time.monotonic()
        if old and self._kill("group", random.choice(old)):
            self._harm.parents.append(now)

    async def _kill_template(self) -> None:
        """And wait until it is there again, so that the time without one is known."""
        templates = (await self._find()).templates
        began = time.monotonic()
        if not templates or not self._kill("template", templates[0]):
            return
        reloads = self._harm.reloads
        reloads.append((began, math.inf))
        self._harm.parents.append(began)
        while time.monotonic() < began + RELOAD_LIMIT:
            await asyncio.sleep(0.1)
            # Another process first: for a moment, the server does not know of the death, and calls itself ready.
            others = [process for process in (await self._find()).templates if process != templates[0]]
            if others and (await self._fetch("GET", "readyz")).status == 200:
                reloads[-1] = (began, time.monotonic())
                return
        self._found_wrong([f"expected the template back {RELOAD_LIMIT:g} s after it was killed"])

    async def _kill_job(self) -> None:
        """One that is at work, or one that rests."""
        calls = [asyncio.create_task(self._list_tasks()) for _ in range(2)]
        if random.random() < 0.5:
            await asyncio.wait(calls)
        until = time.monotonic() + JOB_LIMIT
        jobs: list[psutil.Process] = []
        while not jobs and time.monotonic() < until:
            await asyncio.sleep(0.05)
            jobs = (await self._find()).jobs
        for victim in jobs[:1]:
            self._kill("job", victim)
            # Its death may be noticed only by the next call. Before, none may be killed again: two are not hidden.
            while victim.is_running() and time.monotonic() < until:
                await self._list_tasks()
                await asyncio.sleep(0.05)
        await asyncio.gather(*calls)
        await self._list_tasks()


def _any_manner() -> str:
    return random.choices(list(MANNERS), list(MANNERS.values()))[0]


def _age(process: psutil.Process) -> float:
    return time.time() - float(process.create_time())
