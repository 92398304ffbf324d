"""An env whose worlds misbehave in every way that we know of: each action's content says how.

`hello` is the one action that is harmless: it answers with all that was said to this world.
"""

from __future__ import annotations

import array
import asyncio
import builtins
import contextlib
import ctypes
import dataclasses
import datetime
import decimal
import enum
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any, NoReturn

from aioenv.envs import BaseEnv
from aioenv.errors import BadRequest

MIB = 2**20
# Control characters take six bytes each in JSON: an answer over the pipe's limit of 80 MiB, made of little memory.
TOO_MUCH = "\0" * 14_000_000


def observed(content: Any, **other: Any) -> dict[str, Any]:
    state = [{"role": "user", "content": content}]
    return {"state": state, "reward": 0.0, "is_terminated": False, "info": {}, **other}


def linger() -> NoReturn:
    while True:
        time.sleep(1000)


# -- its own pipe ------------------------------------------------------------------------------------------------------


def pipe() -> int:
    """The fd of this world's pipe: the only socket that it has."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                return int(name)
    raise LookupError("this process has no socket")


def frame(body: bytes, number: int = 2, length: int | None = None) -> bytes:
    """A frame of the pipe: the answer to question `number`. It may announce another length than it has."""
    return (len(body) if length is None else length).to_bytes(4, "big") + number.to_bytes(4, "big") + body


def say(data: bytes) -> None:
    fd, left = pipe(), memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


JUNK: dict[str, bytes] = {
    "text": b"hello, here I am\n",
    "zeros": bytes(100_000),
    "much": b"\1" * (20 * MIB),
    "no_json": frame(b"{hello}"),
    "no_utf8": frame(b'{"data": "\xff\xfe"}'),
    "list": frame(b"[1]"),
    "empty": frame(b"{}", number=999),
    "deep": frame(b"[" * 100_000),
    "half": frame(b'{"da', length=40),  # the answer that follows is taken for the rest
    "waiting": frame(b'{"da', length=70 * MIB),  # the answer that follows is not enough
    "4_gib": frame(b"{}", length=2**32 - 1),
    "number": frame(b'{"data": {}}', number=999),
    "exit": frame(b'{"exit": 1, "status": 9}', number=0),
    "flood": frame(b'{"data": {}}', number=999) * 200_000,
}


# -- exceptions --------------------------------------------------------------------------------------------------------


class Locked(Exception):
    """Can't be pickled."""

    def __init__(self) -> None:
        super().__init__("with a lock in it")
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")

    __repr__ = __str__


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit("no str")

    __repr__ = __str__


class MuteRequest(BadRequest):
    def __str__(self) -> str:
        raise RuntimeError("no str")


class Closed(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Nameless(Exception):
    pass


Nameless.__module__ = None  # type: ignore[assignment]


class Halt(BaseException):
    pass


def deep_group() -> Exception:
    error: Exception = ValueError("innermost")
    for _ in range(3000):
        error = ExceptionGroup("a level", [error])
    return error


def long_chain() -> Exception:
    error = ValueError("the first")
    for number in range(1000):
        later = ValueError(f"the one after {number}")
        later.__cause__ = error
        error = later
    return error


EXCEPTIONS: dict[str, Callable[[], Any]] = {
    "exit": lambda: SystemExit("on purpose"),
    "interrupt": lambda: KeyboardInterrupt("on purpose"),
    "generator_exit": lambda: GeneratorExit("on purpose"),
    "cancelled": lambda: asyncio.CancelledError("on purpose"),
    "stop": lambda: StopIteration("on purpose"),
    "own": lambda: Halt("on purpose"),
    "nothing": lambda: 5,  # not an exception at all
    "locked": Locked,
    "mute": Mute,
    "leaving": Leaving,
    "mute_request": MuteRequest,
    "closed": Closed,
    "nameless": lambda: Nameless("on purpose"),
    "syntax": lambda: SyntaxError("on purpose", ("a file", 1, 1, 5)),  # type: ignore[arg-type] # 5 is no line of text
    "group": lambda: ExceptionGroup("several", [ValueError("one"), TypeError("two")]),
    "base_group": lambda: BaseExceptionGroup("several", [KeyboardInterrupt("three"), ValueError("four")]),
    "deep_group": deep_group,
    "chain": long_chain,
    "huge": lambda: RuntimeError("a long story: " + "x" * 10_000_000),
    "too_huge": lambda: RuntimeError("too long a story: " + TOO_MUCH),
    "surrogate": lambda: RuntimeError("half \ud800 a pair"),
    "memory": lambda: MemoryError("on purpose"),
}


# -- what a step may return --------------------------------------------------------------------------------------------


class Text(str):
    pass


class Number(float):
    """As numpy's float64 is."""


class Floating:
    """As numpy's other scalars are."""

    def __float__(self) -> float:
        return 1.0


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int


class Trap(dict[str, Any]):
    """Refuses to be looked at, with what `except Exception` does not catch."""

    def items(self) -> Any:
        raise KeyboardInterrupt("from items")


class Liar:
    @property
    def __class__(self) -> type:
        raise SystemExit("from __class__")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless_list() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def endless_dict() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


async def later() -> None:
    pass


RETURNED: dict[str, Callable[[], Any]] = {
    # Rubbish.
    "nan_reward": lambda: observed("", reward=float("nan")),
    "inf_reward": lambda: observed("", reward=float("inf")),
    "null_reward": lambda: observed("", reward=None),
    "text_reward": lambda: observed("", reward="1.0"),
    "huge_reward": lambda: observed("", reward=10**400),
    "yes": lambda: observed("", is_terminated="yes"),
    "info_list": lambda: observed("", info=[1]),
    "two": lambda: {"state": [{"role": "user"}, {"role": "user"}]},
    "strings": lambda: {"state": ["hello"]},
    "no_state": lambda: {"reward": 1.0},
    "none": lambda: None,
    "text": lambda: "hello",
    "tuple": lambda: (observed(""), 0.0, False),
    "coroutine": later,
    "bytes": lambda: observed(b"bytes"),
    "set": lambda: observed({1, 2}),
    "object": lambda: observed(object()),
    "generator": lambda: observed(word for word in ["a", "b"]),
    "complex": lambda: observed(1j),
    "decimal": lambda: observed(decimal.Decimal("1.5")),
    "floating": lambda: observed("", reward=Floating()),
    "array": lambda: observed(array.array("d", [1.0])),
    "huge_int": lambda: observed(2**64),
    "huge_negative": lambda: observed(-(2**63) - 1),
    "int_keys": lambda: observed("", info={1: "one"}),
    "none_key": lambda: observed("", info={None: "none"}),
    "endless_list": lambda: observed(endless_list()),
    "endless_dict": lambda: observed(endless_dict()),
    "deep": lambda: observed(nested(3000)),
    "rather_deep": lambda: observed(nested(260)),
    "trap": lambda: observed(Trap(inside={1, 2})),
    "liar": lambda: observed([Liar()]),
    "too_much": lambda: observed(TOO_MUCH),
    # What has an obvious form in JSON.
    "nan": lambda: observed([float("nan"), float("-inf")]),
    "text_subclass": lambda: observed(Text("text")),
    "text_subclass_key": lambda: observed({Text("key"): 1}),
    "float_subclass": lambda: observed(Number(0.5)),
    "int_64": lambda: observed([2**63 - 1, -(2**63), 2**64 - 1]),
    "tuples": lambda: observed((1, (2,))),
    "surrogate": lambda: observed({"half \ud800": "a \udfff pair"}),
    "datetime": lambda: observed(datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)),
    "uuid": lambda: observed(uuid.UUID(int=5)),
    "enum": lambda: observed(Colour.RED),
    "dataclass": lambda: observed(Point(5)),
}


# -- children ----------------------------------------------------------------------------------------------------------


def fork(live: Callable[[], Any], *, twice: bool = False) -> None:
    """Leave a child, or only a grandchild, that has everything open that the world has."""
    child = os.fork()
    if child == 0:
        if twice and os.fork() != 0:
            os._exit(0)
        try:
            live()
            linger()
        finally:
            os._exit(1)  # never back into the world's own loop
    if twice:
        os.waitpid(child, 0)
    time.sleep(0.1)  # so that it is under way


def write_for_ever() -> None:
    """Fill the world's folder, and make it anew when it is gone."""
    folder = os.getcwd()
    os.setsid()
    for number in range(10**9):
        os.makedirs(folder, exist_ok=True)
        with contextlib.suppress(OSError), open(f"{folder}/{number % 100}", "w") as file:
            file.write("still here")


def daemonize() -> None:
    os.setsid()
    os.chdir("/")
    os.closerange(0, 1000)


def resist() -> None:
    os.setsid()
    ignore_signals()


def ignore_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):  # the C library keeps two for itself
            signal.signal(number, signal.SIG_IGN)


def flood() -> None:
    os.setsid()
    time.sleep(0.2)  # the world has answered by then
    while True:
        say(JUNK["number"])


CHILDREN: dict[str, Callable[[], None]] = {
    "same_session": lambda: fork(linger),
    "own_group": lambda: fork(lambda: os.setpgid(0, 0)),
    "own_session": lambda: fork(os.setsid),
    "double": lambda: fork(daemonize, twice=True),
    "stubborn": lambda: fork(resist),
    "program": lambda: [subprocess.Popen(["sleep", "1000"], start_new_session=True, env={}, cwd="/")].clear(),
    "writer": lambda: fork(write_for_ever),
    "flood": lambda: fork(flood),
}


# -- threads -----------------------------------------------------------------------------------------------------------


def spin() -> None:
    while True:
        time.sleep(0)


def print_for_ever() -> None:
    while True:
        print("and another thing", flush=True)
        time.sleep(0.001)


def hold_interpreter() -> None:
    """Never lets another thread run."""
    re.match("(a|a)+$", "a" * 60 + "b")


THREADS: dict[str, Callable[[], Any]] = {
    "spin": spin,
    "print": print_for_ever,
    "stay": linger,
    "hold": hold_interpreter,
    "raise": lambda: sys.exit("in a thread"),
}


class BadEnv(BaseEnv):
    def __init__(self, task_id: str, instance_id: str, params: dict[str, Any]) -> None:
        super().__init__(task_id, instance_id, params)
        self.said: list[str] = []

    def get_init_state(self, params: dict[str, Any]) -> dict[str, Any]:
        return observed("behave")

    def step(self, action: dict[str, Any], params: dict[str, Any]) -> Any:
        said = str(action["content"])
        self.said.append(said)
        what, *rest = said.split()
        result = getattr(self, f"do_{what}")(*rest)
        return result if what == "return" else observed(result)

    def evaluate(self, messages: dict[str, Any], params: dict[str, Any]) -> float:
        return 0.0

    @staticmethod
    def get_query_list(split: str, params: dict[str, Any]) -> list[str]:
        return ["t"]

    def do_hello(self, *_: str) -> str:
        return ", ".join(self.said)

    # -- hanging -----------------------------------------------------------------------------------------------------

    def do_loop(self) -> None:
        while True:
            pass

    def do_sleep(self) -> None:
        linger()

    def do_deadlock(self) -> None:
        lock = threading.Lock()
        with lock, lock:
            pass

    def do_sum(self) -> None:
        sum(range(10**12))

    def do_power(self) -> None:
        pow(3, 1 << 200_000, (1 << 200_000) - 1)

    def do_regex(self) -> None:
        hold_interpreter()

    def do_cling(self) -> None:
        """Hang, and let nothing stop it."""
        ignore_signals()
        while True:
            try:
                sum(range(10**6))
            except BaseException:
                continue

    def do_halt(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_print_on(self) -> None:
        while True:
            print("and another thing", flush=True)

    def do_swallow(self) -> None:
        """The answer is never sent."""
        socket.socket.sendall = lambda *_: None  # type: ignore[method-assign]

    def do_leave_main(self) -> None:
        """The main thread ends; another one keeps the process, and holds its pipe open."""
        threading.Thread(target=linger).start()
        ctypes.CDLL(None).pthread_exit(None)

    # -- ending ------------------------------------------------------------------------------------------------------

    def do_exit(self, code: str) -> None:
        os._exit(int(code))

    def do_kill(self, number: str) -> None:
        os.kill(os.getpid(), int(number))
        linger()

    def do_segfault(self) -> None:
        ctypes.string_at(0)

    def do_abort(self) -> None:
        os.abort()

    def do_exec(self) -> None:
        os.execvp("sleep", ["sleep", "1000"])

    def do_alarm(self) -> None:
        """Death comes later, while nothing is asked."""
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    def do_late_error(self) -> None:
        def fail(*_: Any) -> None:
            raise TimeoutError("too late")

        signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    def do_overflow(self) -> None:
        """Of the C stack, which nothing limits there: one level for each bracket."""
        pattern = b"(" * 200_000
        ctypes.CDLL(None).regcomp(ctypes.create_string_buffer(1024), pattern, 1)

    def do_recurse(self) -> None:
        self.do_recurse()

    def do_recurse_in_c(self) -> None:
        sys.setrecursionlimit(200_000)

        def deeper(_: int) -> None:
            list(map(deeper, [0]))

        deeper(0)

    def do_shout(self) -> None:
        print("x" * (5 * MIB), end="", flush=True)
        os.abort()

    def do_log(self, how: str) -> None:
        """Put something else in the place of the log, and die."""
        os.unlink("world.log")
        if how == "fifo":
            os.mkfifo("world.log")
        elif how == "folder":
            os.mkdir("world.log")
        elif how == "link":
            os.symlink("world.log", "world.log")
        elif how == "binary":
            with open("world.log", "wb") as file:
                file.write(bytes(range(256)) * 100)
        os.abort()

    # -- raising and returning ---------------------------------------------------------------------------------------

    def do_raise(self, what: str) -> None:
        raise EXCEPTIONS[what]()

    def do_sys_exit(self) -> None:
        sys.exit(3)

    def do_interrupt(self) -> None:
        signal.raise_signal(signal.SIGINT)

    def do_return(self, what: str) -> Any:
        return RETURNED[what]()

    # -- the pipe ----------------------------------------------------------------------------------------------------

    def do_junk(self, what: str) -> None:
        say(JUNK[what])

    def do_forge(self, times: str) -> None:
        """Answer in the worker's stead."""
        number = len(self.said) + 1  # the first question was `create`
        say(frame(json.dumps({"data": observed("forged")}).encode(), number) * int(times))

    def do_forge_deep(self) -> None:
        number = len(self.said) + 1
        say(frame(json.dumps({"data": observed(nested(500))}).encode(), number))

    def do_flood_later(self) -> None:
        def run() -> None:
            time.sleep(0.2)  # the answer is out by then
            while True:
                say(JUNK["number"])

        threading.Thread(target=run).start()

    def do_close(self, what: str, then: str = "return") -> None:
        if what == "pipe":
            os.close(pipe())
        elif what == "shutdown":
            socket.socket(fileno=os.dup(pipe())).shutdown(socket.SHUT_RDWR)
        else:
            os.closerange(0, 1000)
        if then == "sleep":
            linger()

    def do_replace(self, what: str) -> None:
        """Put something else in the place of the pipe, or the pipe in the place of something else."""
        fd = pipe()
        if what == "null":
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        elif what == "output":
            os.dup2(fd, 1)
            print("x" * 100, flush=True)
        else:
            if what == "hidden":
                os.dup(fd)  # the server does not see it end
            self.pair = socket.socketpair()
            os.dup2(self.pair[0].fileno(), fd)

    # -- children and threads ----------------------------------------------------------------------------------------

    def do_child(self, how: str, then: str = "return") -> None:
        CHILDREN[how]()
        if then == "exit":
            os._exit(3)
        if then == "sleep":
            linger()

    def do_both(self) -> None:
        """Two go on as this world."""
        os.fork()

    def do_move(self, then: str = "return") -> None:
        """Go on as another process, which no group or session ties to this one."""
        read, write = os.pipe()
        if os.fork() != 0:
            os.read(read, 1)
            os._exit(0)
        os.setsid()
        os.write(write, b"away")
        if then == "sleep":
            linger()

    def do_thread(self, what: str, count: str = "1") -> None:
        for _ in range(int(count)):
            threading.Thread(target=THREADS[what]).start()

    # -- its surroundings --------------------------------------------------------------------------------------------

    def do_print(self) -> None:
        for _ in range(50):
            print("x" * MIB)

    def do_output(self, what: str) -> None:
        if what == "none":
            sys.stdout = sys.stderr = None  # type: ignore[assignment]
        else:
            sys.stdout.close()
            sys.stderr.close()

    def do_delete_folder(self) -> None:
        shutil.rmtree(os.getcwd())

    def do_deep_folder(self) -> None:
        """Deeper than Python's recursion goes, and than a path can be long."""
        for _ in range(1500):
            os.mkdir("deeper")
            os.chdir("deeper")

    def do_chdir(self) -> None:
        os.chdir("/")

    def do_umask(self) -> None:
        os.umask(0o777)
        os.makedirs("unreadable")
        open("unreadable too", "w").close()

    def do_setsid(self) -> None:
        os.setsid()

    def do_setpgid(self) -> None:
        os.setpgid(0, 0)

    def do_sigchld(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        subprocess.run(["true"], check=True)

    def do_signals(self, how: str) -> None:
        if how == "ignored":
            ignore_signals()
            return
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError):
                signal.signal(number, signal.SIG_DFL)

    def do_limit(self, what: str) -> None:
        if what == "files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        elif what == "size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        else:
            with open("/proc/self/statm") as statm:
                used = int(statm.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 16 * MIB, used + 16 * MIB))
            bytearray(100 * MIB)

    def do_patch(self, what: str, then: str = "return") -> None:
        """Break what the worker may depend on."""

        def broken(*_: Any, **__: Any) -> NoReturn:
            raise RuntimeError("broken on purpose")

        if what == "builtins":
            for name in ("open", "print", "input", "__import__", "exec", "eval", "compile"):
                setattr(builtins, name, broken)
        elif what == "modules":
            for module, name in [(os, "write"), (os, "read"), (json, "dumps"), (json, "loads"), (os, "getpid")]:
                setattr(module, name, broken)
        elif what == "traceback":
            traceback.format_exc = broken
        else:
            vars(builtins).clear()
        if then == "raise":
            raise ValueError("on purpose")
