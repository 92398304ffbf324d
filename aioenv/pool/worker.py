"""The one program that every process of the pool runs; they differ in age only.

    server ──▶ root            nothing loaded; adopts and reaps what loses its parent
                └─▶ template        has loaded and warmed one env
                     ├─▶ group      has made a world of one task and rests, to be copied
                     │     └─▶ world
                     └─▶ world      has made one instance of its own

Each is a loop that reads a frame from its own pipe, acts and answers. One of the acts is `fork`: it brings the far ends
of a new pipe and a new lifeline; the child goes on in the same loop, on that pipe, under a new identity. So a world
costs a fork, not a start. Each request has a number, which its answer repeats:

    1 {"op": "fork", "folder": …}            ──▶ 1 {"data": 123}, the child's pid
    2 {"op": "load", "spec": {…}, …}         ──▶ 2 {"data": {"forkable": true}}
    3 {"op": "step", "messages": {…}, …}     ──▶ 3 {"data": {…}} or {"error": {"code": …, "message": …}}
                                                 0 {"exit": 123, "status": 9}   unasked: a child ended
Nothing here imports asyncio or the server. One thread, so that it can be forked at any time.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aioenv.envs.base import BaseEnv
from aioenv.envs.registry import EnvSpec
from aioenv.errors import BadRequest, UnknownTask
from aioenv.linux import children_of, collapse_memory, set_subreaper
from aioenv.pool import lifeline
from aioenv.pool.confine import Confinement, confine
from aioenv.pool.wire import EXIT_REPORT, FRAME_LIMIT, Channel, pack
from aioenv.pool.worldlog import LOG_NAME

# In a world's environment: its folder. Tells whose the processes are that it starts.
HOME_VARIABLE = "AIOENV_WORLD_FOLDER"
# Characters of an error's message.
MESSAGE_LIMIT = 2**16


class Worker:
    """State of this process: its pipe, and what it has loaded. `serve` is its whole life."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._lifeline_fd: int | None = None  # the root has none: see `main`
        self.env_class: type[BaseEnv] | None = None
        self.env: BaseEnv | None = None
        self.answer_limit = FRAME_LIMIT  # bytes
        self._children: ChildWatch | None = ChildWatch()
        self._acts: dict[str, Callable[[dict[str, Any]], Any]] = {
            "load": self._load,
            "create": self._create,
            "rest": self._rest,
            "pause": self._pause,
            "resume": self._resume,
            "wake": self._wake,
            "step": self._step,
            "evaluate": self._evaluate,
            "get_info": self._get_info,
            "sweep": self._sweep,
        }

    def serve(self) -> None:
        """Answer until the pipe ends or `close` comes."""
        while True:
            received = self._next()
            if received is None:
                return
            number, frame = received
            op = frame.get("op")
            if op == "close":
                answer = self._answer(self._close, frame)
            elif op == "fork":
                fds = self.channel.take_fds(2)
                answer = self._answer(self._fork, frame)
                if answer.get("data") == 0:
                    self._be_born(frame, *fds)
                    continue  # the child: same loop, another pipe
                for fd in fds:
                    os.close(fd)
            else:
                answer = self._answer(self._acts[str(op)], frame)
            self._send(number, answer)
            if op == "close":
                return

    def _next(self) -> tuple[int, dict[str, Any]] | None:
        """Wait for a frame; meanwhile report children that end."""
        while self._children is not None and not self.channel.buffered:
            readable = self._children.wait(self.channel.sock)
            for pid, status in _reap():
                self._send(EXIT_REPORT, {"exit": pid, "status": status})
            if readable:
                break
        return self.channel.receive()

    def _send(self, number: int, answer: dict[str, Any]) -> None:
        self.channel.send_bytes(_encode(number, answer, self.answer_limit))

    def _answer(self, act: Callable[[dict[str, Any]], Any], frame: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"data": act(frame)}
        except BaseException as error:  # a stray SystemExit or KeyboardInterrupt of env code must not end it either
            return {"error": _described(error)}

    # -- acts --------------------------------------------------------------------------------------------------------

    def _load(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Become a template."""
        os.environ.update(frame["environ"])
        self.env_class = EnvSpec(**frame["spec"]).load()
        self.env_class.warm()
        # It may have taken over SIGCHLD or its wakeup, as an asyncio loop does.
        assert self._children is not None
        self._children.close()
        self._children = ChildWatch()
        _settle()
        collapse_memory()
        return {"forkable": self.env_class.forkable}

    def _create(self, frame: dict[str, Any]) -> Any:
        """Become a world."""
        assert self.env_class is not None
        self.env = self.env_class(frame["task_id"], frame["instance_id"], frame["params"])
        return self.env.get_init_state(frame["params"])

    def _rest(self, frame: dict[str, Any]) -> None:
        """Become a group's template: from here on, be copied and nothing else."""
        assert self.env is not None
        self.env.before_fork()
        set_subreaper(False)  # what its copies leave behind is the root's
        _settle()
        self._children = ChildWatch()

    def _pause(self, frame: dict[str, Any]) -> None:
        """A world, about to be copied: until `resume` it takes no calls."""
        assert self.env is not None
        self.env.before_fork()

    def _resume(self, frame: dict[str, Any]) -> None:
        assert self.env is not None
        self.env.after_fork()

    def _wake(self, frame: dict[str, Any]) -> None:
        """Become a world, as a copy of the group's."""
        assert self.env is not None
        self.env.instance_id = frame["instance_id"]
        self.env.after_fork()

    def _step(self, frame: dict[str, Any]) -> Any:
        assert self.env is not None
        return self.env.step(frame["messages"], frame["params"])

    def _evaluate(self, frame: dict[str, Any]) -> Any:
        assert self.env is not None
        return self.env.evaluate(frame["messages"], frame["params"])

    def _get_info(self, frame: dict[str, Any]) -> Any:
        assert self.env is not None
        return self.env.get_info(frame["messages"], frame["params"])

    def _sweep(self, frame: dict[str, Any]) -> int:
        """End children that the server does not know: what worlds left behind, adopted by the root. How many.

        A living world may have such a child too, a daemon: it is spared.
        """
        unknown = set(children_of(os.getpid())) - set(frame["keep"])
        strays = [pid for pid in unknown if home_of(pid) not in frame["folders"]]
        for pid in strays:
            os.kill(pid, signal.SIGKILL)  # its pid can't be another's: nobody but this process reaps it
        return len(strays)

    def _close(self, frame: dict[str, Any]) -> None:
        if self.env is not None:
            if frame["keep"]:
                self.env.save()
            self.env.close()

    # -- forking -----------------------------------------------------------------------------------------------------

    def _fork(self, frame: dict[str, Any]) -> int:
        """The child's pid; 0 in the child."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # or the child would write it again
        return os.fork() if self._children is not None else _fork_away()

    def _be_born(self, frame: dict[str, Any], pipe_fd: int, lifeline_fd: int) -> None:
        """In the child: let go of what was the parent's, take up what came for this one."""
        folder = frame["folder"]
        self.channel.close()
        if self._lifeline_fd is not None:
            os.close(self._lifeline_fd)
        if self._children is not None:
            self._children.close()
        os.setsid()
        lifeline.tie(lifeline_fd)
        self._lifeline_fd = lifeline_fd
        os.chdir(folder)
        os.environ[HOME_VARIABLE] = folder
        _redirect_output(Path(folder) / LOG_NAME)
        self.channel = Channel(socket.socket(fileno=pipe_fd))
        # A world runs a model's code, which may have children of its own: it does not look after any.
        self._children = ChildWatch() if self.env_class is None else None
        if self.env is not None:
            gc.freeze()  # as `_settle`, but for the time that collecting takes
        if frame["limits"] is not None:
            confinement = Confinement(**frame["limits"])
            self.answer_limit = confinement.answer
            confine(confinement)
            # A world's own daemons stay its own, until it ends. Then they become the root's, which ends them.
            set_subreaper(True)


def _fork_away() -> int:
    """As `os.fork`, for a world, which looks after no children: the copy is the root's from its first moment on."""
    read, write = os.pipe()
    set_subreaper(False)
    try:
        between = os.fork()
    except OSError:
        between = -1
    if between == 0:
        try:
            copy = os.fork()
        except OSError:
            copy = -1
        if copy != 0:
            os.write(write, b"%d" % copy)
            os._exit(0)
        os.close(read)
        os.close(write)
        return 0
    os.close(write)
    told = os.read(read, 20) if between > 0 else b""
    os.close(read)
    if between > 0:
        try:
            os.waitpid(between, 0)
        except ChildProcessError:
            pass  # its code has children reaped by the kernel
    set_subreaper(True)
    if not told or int(told) < 0:
        raise OSError("the world could not be forked: the machine has no room for another process")
    return int(told)


class ChildWatch:
    """Notices children that end, and adopted ones, by SIGCHLD."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def wait(self, sock: socket.socket) -> bool:
        """Block until `sock` can be read, or children may have ended; whether it can be read."""
        self._selector.register(sock, selectors.EVENT_READ)
        try:
            ready = {key.fd for key, _ in self._selector.select()}
        finally:
            self._selector.unregister(sock)
        if self._read in ready:
            os.read(self._read, 4096)
        return sock.fileno() in ready

    def close(self) -> None:
        """In a child after a fork: these are its parent's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        os.close(self._read)
        os.close(self._write)


def _reap() -> Iterator[tuple[int, int]]:
    """The (pid, wait status) of each child that has ended."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None:
            return
        # Before its pid is free again: end what it left behind in its process group.
        try:
            os.killpg(info.si_pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        yield os.waitpid(info.si_pid, 0)


def _settle() -> None:
    """What lives now will be shared by all forks: keep the collector from touching, and so copying, its pages."""
    gc.collect()
    gc.freeze()


def _described(error: BaseException) -> dict[str, str]:
    """An answer's error. Whatever the exception's own methods do, and however much they say."""
    try:
        if isinstance(error, BadRequest | UnknownTask):
            return {"code": error.code, "message": _shortened(str(error))}
        return {"code": "env_error", "message": _shortened("".join(traceback.format_exception(error)))}
    except BaseException:
        return {"code": "env_error", "message": f"{type(error).__name__}, which can't be shown: its methods raise"}


def _shortened(text: str) -> str:
    cut = len(text) - MESSAGE_LIMIT
    half = MESSAGE_LIMIT // 2
    return text if cut <= 0 else f"{text[:half]}\n… {cut:,} characters left out …\n{text[-half:]}"


def _encode(number: int, answer: dict[str, Any], limit: int) -> bytes:
    """Its own classes may raise anything meanwhile, too."""
    try:
        return pack(number, answer, limit)
    except BaseException as error:
        try:  # a model may print half a surrogate pair, which JSON text can't hold
            return pack(number, _without_surrogates(answer), limit)
        except BaseException:
            message = f"the env's answer can't be sent as JSON: {_described(error)['message']}"
            return pack(number, _without_surrogates({"error": {"code": "env_error", "message": message}}))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value


def home_of(pid: int) -> str | None:
    """The folder of the world that a process descends from, if it can be told: by its environment, or where it is."""
    try:
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == HOME_VARIABLE.encode():
                return os.fsdecode(value)
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return None


def _end_all_children() -> None:
    """The root's last act: the server is gone. Worlds die by their lifelines, but not what they left behind."""
    deadline = time.monotonic() + 5
    while (children := children_of(os.getpid())) and time.monotonic() < deadline:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for _ in children:
            os.wait()


def _redirect_output(log: Path) -> None:
    """Stray prints, also those of C code, go to `log`; nothing comes from standard input."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.close(null)


def main() -> None:
    """The root: started by the server, in a session of its own, with the fd of its pipe.

    It needs no lifeline: it never does anything that takes time, so it sees the end of its pipe at once.
    """
    pipe_fd = int(sys.argv[1])
    os.set_inheritable(pipe_fd, False)
    set_subreaper(True)
    # For all that descend from this one: a crash tells where it was, and leaves no image of the memory on the disk.
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    worker = Worker(Channel(socket.socket(fileno=pipe_fd)))
    root = os.getpid()
    code = 0
    try:
        worker.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server is gone
    except BaseException:
        traceback.print_exc()
        code = 1
    if os.getpid() == root:
        _end_all_children()
    # Without the interpreter's own farewell, which waits for threads that an env left running.
    os._exit(code)


if __name__ == "__main__":
    main()
