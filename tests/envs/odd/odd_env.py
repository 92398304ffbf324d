"""An env that misbehaves on demand: each action's content names what to do."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from aioenv.envs import BaseEnv
from aioenv.errors import BadRequest, UnknownTask

LOADED_IN = os.getpid()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class OddEnv(BaseEnv):
    warmed_in = 0

    def __init__(self, task_id: str, instance_id: str, params: dict[str, Any]) -> None:
        super().__init__(task_id, instance_id, params)
        if task_id == "missing":
            raise UnknownTask("no such task: missing; there is: t")
        if params.get("bad"):
            raise BadRequest('"params.bad" is bad')
        if task_id == "raise":
            raise RuntimeError("raised in the constructor")
        if task_id == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task_id == "cry":
            self.do_cry("in creation")
        if task_id == "hang":
            time.sleep(1000)
        time.sleep(params.get("sleep", 0))
        self.said: list[str] = []
        self.held: list[Any] = []

    @classmethod
    def warm(cls) -> None:
        cls.warmed_in = os.getpid()

    def get_init_state(self, params: dict[str, Any]) -> dict[str, Any]:
        if self.task_id == "shapeless":
            return {"state": "no list"}
        return {"state": [{"role": "user", "content": "behave"}], "reward": 0.0, "is_terminated": False, "info": {}}

    def step(self, action: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        what, _, rest = str(action.get("content")).partition(" ")
        self.said.append(what)
        result: Any = getattr(self, f"do_{what}")(rest)
        reply = {"state": [{"role": "user", "content": result}], "reward": 0.0, "is_terminated": False, "info": {}}
        if (what, rest) == ("large", "two"):
            reply["state"] = [*reply["state"], {}]  # type: ignore[misc]
        if (what, rest) == ("large", "nan"):
            reply["reward"] = float("nan")
        return {**reply, **params.get("reply", {})} if what != "return" else result

    def do_history(self, rest: str) -> str:
        return " ".join(self.said)

    def do_pids(self, rest: str) -> list[int]:
        return [LOADED_IN, self.warmed_in, os.getpid(), os.getppid()]

    def do_sleep(self, rest: str) -> str:
        time.sleep(float(rest))
        return "slept"

    def do_raise(self, rest: str) -> str:
        kinds = (Exception, SystemExit, KeyboardInterrupt)
        raise {kind.__name__: kind for kind in kinds}[rest]("on demand")

    def do_kill(self, rest: str) -> str:
        os.kill(os.getpid(), int(rest))
        time.sleep(1000)
        return ""

    def do_exit(self, rest: str) -> str:
        os._exit(int(rest))

    def do_block(self, rest: str) -> str:
        """Hang, with every signal that can be blocked blocked."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            sum(range(10**9))

    def do_print(self, rest: str) -> str:
        print(rest)
        os.write(1, b"written past Python\n")
        return os.getcwd()

    def do_write(self, rest: str) -> str:
        with open("output.txt", "w") as file:
            file.write(rest)
        return os.getcwd()

    def do_daemon(self, rest: str) -> int:
        """Leave a child that outlives the world, holding what it inherited."""
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
            os._exit(0)
        return pid

    def do_escape(self, rest: str) -> int:
        """Leave a child with a session of its own."""
        import subprocess

        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    def do_spoil(self, rest: str) -> str:
        """Put something else in the place of the own folder."""
        folder = os.getcwd()
        os.rename(folder, f"{folder}.away")
        if rest == "file":
            open(folder, "w").close()
        elif rest == "link":
            os.symlink("/nowhere", folder)
        elif rest == "locked":
            os.mkdir(folder)
            os.mkdir(f"{folder}/inner")
            os.chmod(f"{folder}/inner", 0)
            os.chmod(folder, 0)
        return folder

    def do_forge(self, rest: str) -> str:
        """Answer in the worker's stead, with what is no answer."""
        return self.answer(b'{"error": 5}')

    def do_junk(self, rest: str) -> str:
        return self.write_to_pipe(rest.encode() or b"\x00\x00\x00\x05hello")

    def answer(self, body: bytes) -> str:
        """In a frame as the worker would send it: its first question was that of the create."""
        number = len(self.said) + 1
        return self.write_to_pipe(len(body).to_bytes(4, "big") + number.to_bytes(4, "big") + body)

    def write_to_pipe(self, data: bytes) -> str:
        """To every socket that is open."""
        for name in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{name}") and os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                os.write(int(name), data)
        return "wrote"

    def do_eat(self, rest: str) -> str:
        """Take so many MiB, all at once or bit by bit, and hold them."""
        for _ in range(int(rest)):
            self.held.append(b"\1" * 2**20)
        return "full"

    def do_eat_in_child(self, rest: str) -> int:
        pid = os.fork()
        if pid == 0:
            self.do_eat(rest)
            time.sleep(1000)
            os._exit(0)
        return pid

    def do_fork(self, rest: str) -> str:
        """Have so many children."""
        for _ in range(int(rest)):
            if os.fork() == 0:
                time.sleep(1000)
                os._exit(0)
        return "forked"

    def do_fill(self, rest: str) -> str:
        """Write so many MiB, to files of one each."""
        for number in range(int(rest)):
            with open(f"{number}.dat", "wb") as file:
                file.write(b"x" * 2**20)
        return "filled"

    def do_fill_removed(self, rest: str) -> str:
        """The same, to a file that has no name any more."""
        self.file = open("removed.dat", "wb")  # noqa: SIM115 - it stays open
        os.unlink("removed.dat")
        for _ in range(int(rest)):
            self.file.write(b"x" * 2**20)
            self.file.flush()
        return "filled"

    def do_file(self, rest: str) -> str:
        """Write one file of so many MiB."""
        with open("one.dat", "wb") as file:
            for _ in range(int(rest)):
                file.write(b"x" * 2**20)
        return "filled"

    def do_open(self, rest: str) -> str:
        with contextlib.ExitStack() as stack:  # where it fails, none stays open
            for _ in range(int(rest)):
                stack.enter_context(open(os.devnull))
            self.held.append(stack.pop_all())
        return "opened"

    def do_cry(self, rest: str) -> str:
        """Say last words and die."""
        print("first words")
        print(rest, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def do_segfault(self, rest: str) -> str:
        import ctypes

        return str(ctypes.string_at(0))

    def do_shout(self, rest: str) -> str:
        """Print so many MiB."""
        for number in range(int(rest)):
            print("x" * (2**20 - 20), number, flush=True)
        return "shouted"

    def do_surrogate(self, rest: str) -> str:
        return "half \ud800 a pair"

    def do_big(self, rest: str) -> str:
        return "x" * int(rest)

    def do_measure(self, rest: str) -> int:
        return len(rest)

    def do_large(self, rest: str) -> str:
        """Answer at length, and wrongly."""
        if rest == "raise":
            raise RuntimeError("x" * 2**20)
        if rest == "junk":
            return self.answer(b'{"data": ' + b"x" * 2**20)
        return "x" * 2**20

    def do_return(self, rest: str) -> Any:
        return {
            "nan": {"state": [{"role": "user", "content": ""}], "reward": float("nan")},
            "set": {"state": [{"role": "user", "content": {1, 2}}]},
            "two": {"state": [{"role": "user"}, {"role": "user"}]},
            "text": "text",
            "none": None,
            "deep": {"state": [{"role": "user", "content": nested(3000)}]},
            "loop": {"state": [{"role": "user", "content": endless()}]},
            "yes": {"state": [{"role": "user", "content": ""}], "is_terminated": "yes"},
        }[rest]

    def evaluate(self, messages: dict[str, Any], params: dict[str, Any]) -> float:
        if params.get("hang"):
            time.sleep(1000)
        return float(params.get("score", 0.0)) if "score" in params else float("nan")

    @staticmethod
    def get_query_list(split: str, params: dict[str, Any]) -> list[str]:
        if split == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if split == "raise":
            raise RuntimeError("raised in get_query_list")
        return ["t", str(os.getpid())]
