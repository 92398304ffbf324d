"""The server's end of one worker process: calls over its pipe, its death, and its children's.

    call("step", …) ──▶ transport ──▶ pipe ──▶ Worker.serve      (worker.py, in the process)
         future ◀── _dispatch ◀── data_received ◀──┘

The asyncio transport reads and writes whole buffers without blocking; frames are cut here. A large answer is handed on
as it came, for somebody with more time to read (`Unread`). A death is told by the
parent that reaped it (`{"exit": pid, …}` on the parent's pipe), which names the signal; the end of the pipe alone is
taken for a death too, as the reaper may be dead itself.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from aioenv.errors import AioenvError, BadRequest, EnvError, InternalError
from aioenv.linux import oom_kills, resident_memory
from aioenv.pool.answer import NoAnswer, Unread, read_answer
from aioenv.pool.lifeline import Lifeline
from aioenv.pool.wire import EXIT_REPORT, LARGE, Body, FrameDecoder, FrameError, load_object, pack, pack_around

log = logging.getLogger("aioenv.pool")

# Seconds from the end of the pipe to looking whether the process is alive without a pipe, and how often that is looked
# again at one that is dead, whose exit report must be on its way.
EXIT_REPORT_GRACE, EXIT_REPORT_LOOKS = 0.2, 25
# Seconds for which the exit of a process that nobody knows yet is remembered: news of its birth come another way.
EARLY_EXIT_TTL = 5.0
# Seconds from the exit report to the end of the pipe, before going on without it: a grandchild may hold it open.
PIPE_END_GRACE = 1.0
# Seconds that a process may take for a fork, before it is taken for stuck.
FORK_LIMIT = 20.0
# Bytes that are written at once of what is large.
PIECE = 2**18
# Seconds that a killed process has to die of its cut lifeline, before it is killed by pid.
KILL_GRACE = 1.0


class WorkerDied(Exception):
    """The process ended before, or instead of, answering. The text is the cause: `killed by SIGKILL (9)`."""


class Family(dict[int, "WorkerProcess"]):
    """All living processes that descend from one root, by pid."""

    def __init__(self) -> None:
        super().__init__()
        self._early: dict[int, tuple[float, int]] = {}

    def born(self, process: WorkerProcess) -> None:
        self[process.pid] = process
        ended_at, status = self._early.pop(process.pid, (0.0, 0))
        if ended_at and time.monotonic() - ended_at < EARLY_EXIT_TTL:
            process._exited(status)

    def exited(self, pid: int, status: int) -> None:
        if pid in self:
            self[pid]._exited(status)
            return
        now = time.monotonic()
        self._early = {pid: early for pid, early in self._early.items() if now - early[0] < EARLY_EXIT_TTL}
        self._early[pid] = (now, status)


@dataclass
class _Call:
    future: asyncio.Future[Any]
    # Runs the moment the answer is read, before any later frame is looked at.
    convert: Callable[[Any], Any] | None = None


class WorkerProcess(asyncio.Protocol):
    """One process. Not made directly: see `start_root` and `fork`."""

    def __init__(self, name: str, family: Family, sock: socket.socket, line: Lifeline | None) -> None:
        self.name = name
        self.pid = 0
        # Done, with the cause, when the process is gone.
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._family = family
        self._sock = sock
        self._lifeline = line
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()
        self._unsent: deque[bytes | memoryview] = deque()
        self._paused = False  # the transport's buffer is full
        self._calls: dict[int, _Call] = {}
        self._number = 0
        self._fork_lock = asyncio.Lock()
        self._reason: str | None = None  # why we killed it
        self._exit_status: int | None = None
        self._oom_kills = oom_kills()
        self._pipe_ended = False
        self.bears_children = False

    # -- calling -----------------------------------------------------------------------------------------------------

    async def call(self, op: str, messages: dict[str, Any] | bytes | None = None, **fields: Any) -> Any:
        """Ask the process to do `op`; its answer's data, or Unread where that is large. `messages`, if any, are one of
        the fields, and may be JSON already.

        Raises WorkerDied, or what the env raised: BadRequest, UnknownTask, EnvError. Cancelling leaves the process at
        work with an answer that nobody takes: whoever cancels must kill it.
        """
        await self._wait_if_ending()
        assert self._transport is not None
        try:
            if isinstance(messages, bytes):
                parts = pack_around(self._number + 1, {"op": op, **fields}, "messages", messages)
            elif messages is not None:
                parts = [pack(self._number + 1, {"op": op, "messages": messages, **fields})]
            else:
                parts = [pack(self._number + 1, {"op": op, **fields})]
        except (TypeError, FrameError) as error:
            raise BadRequest(f"the request can't be passed on to the world: {error}") from None
        call = self._new_call()
        if len(parts) == 1 and len(parts[0]) <= PIECE and not self._unsent and not self._paused:
            self._transport.write(parts[0])  # nearly always
        else:
            self._unsent.extend(parts)
            self._send()
        return await call.future

    def _send(self) -> None:
        """Write as much as the transport takes now; a large part piece by piece, as copying it takes milliseconds."""
        while self._unsent and not self._paused and self._transport is not None:
            part = self._unsent.popleft()
            if len(part) > 2 * PIECE:
                part, rest = part[:PIECE], memoryview(part)[PIECE:]
                self._unsent.appendleft(rest)
            self._transport.write(part)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._send()

    async def fork(self, name: str, folder: Path, limits: dict[str, Any] | None = None) -> WorkerProcess:
        """A child of this process, living in `folder`, within `limits` (confine.py) if it is to run a model's code.

        Raises WorkerDied and InternalError."""
        async with self._fork_lock:  # one at a time: the pipe's buffer must have room for the descriptors
            await self._wait_if_ending()
            near, far = multiprocessing.Pipe(duplex=True)
            with near, far:
                sock = socket.socket(fileno=os.dup(near.fileno()))
                try:
                    line = Lifeline()
                except BaseException:
                    sock.close()
                    raise
                child = WorkerProcess(name, self._family, sock, line)
                call = self._new_call(child._born)
                frame = pack(self._number, {"op": "fork", "folder": str(folder), "limits": limits})
                try:
                    socket.send_fds(self._sock, [frame], [far.fileno(), line.far])
                except OSError as error:
                    # Dead, if not yet reported as such; or it has not read for long, so that its buffer is full.
                    self.kill(f"its pipe can't be written to ({error})")
            line.handed_over()
            try:
                async with asyncio.timeout(FORK_LIMIT):
                    await call.future
                await child._connect()
            except BaseException as error:
                # A child that is born yet finds its lifeline cut, and its parent reports it as any other death.
                line.cut()
                sock.close()
                if isinstance(error, TimeoutError):
                    self.kill(f"it did not fork within {FORK_LIMIT:g} s")
                    raise WorkerDied(str(self._reason)) from None
                if isinstance(error, EnvError):
                    raise InternalError(f"{self.name} could not fork: {error}") from None
                raise
        return child

    def _born(self, data: Any) -> None:
        self.pid = int(data)
        self._family.born(self)

    async def _connect(self) -> None:
        self._sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._sock)

    @property
    def takes_calls(self) -> bool:
        """It is neither dead nor dying, as far as is known."""
        return self._reason is None and not self._pipe_ended and not self.ended.done()

    async def _wait_if_ending(self) -> None:
        """Raises WorkerDied for a process that is dead or dying, with the cause, which may take a moment to come."""
        if self._reason is not None:
            raise WorkerDied(self._reason)
        if self._pipe_ended or self.ended.done():
            raise WorkerDied(await asyncio.shield(self.ended))

    def _new_call(self, convert: Callable[[Any], Any] | None = None) -> _Call:
        self._number += 1
        call = self._calls[self._number] = _Call(asyncio.get_running_loop().create_future(), convert)
        return call

    # -- answers (asyncio.Protocol) ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is not derived from that

    def data_received(self, data: bytes) -> None:
        if self._reason is not None:
            return  # being killed: nothing it says counts
        try:
            if not self._calls and not self.bears_children:
                raise FrameError("it was not asked anything")
            for number, body in self._decoder.feed(data):
                self._dispatch(number, body)
        except FrameError as error:
            self.kill(f"its process wrote what is no answer to its pipe ({error})")

    def _dispatch(self, number: int, body: Body) -> None:
        if self.bears_children and number == EXIT_REPORT:
            report = load_object(body)
            self._family.exited(int(report["exit"]), int(report["status"]))
            return
        call = self._calls.get(number)
        if call is None:
            raise FrameError(f"answer {number} belongs to no question")
        # Read before the call is forgotten: where this is no answer, it is failed together with the process.
        outcome: Any = None
        failure: AioenvError | None = None
        if len(body) >= LARGE:
            outcome = Unread(body)
        else:
            try:
                outcome = read_answer(body)
            except NoAnswer as error:
                raise FrameError(str(error)) from None
            except AioenvError as error:
                failure = error
        del self._calls[number]
        if call.future.done():
            return
        if failure is not None:
            call.future.set_exception(failure)
        else:
            call.future.set_result(call.convert(outcome) if call.convert else outcome)

    # -- death -------------------------------------------------------------------------------------------------------

    def kill(self, reason: str) -> None:
        """End the process now, whatever it does. `reason` completes the sentence "the instance ended: …"."""
        if self.ended.done():
            return
        if self._reason is None:
            self._reason = reason
        self._cut()
        if self._transport is not None:
            self._transport.abort()  # nothing that it says counts any more, and it may have much to say
        loop = asyncio.get_running_loop()
        loop.call_later(KILL_GRACE, self._kill_by_pid)
        # The last resort, where nobody reports its exit and a stranger holds its pipe open: nothing waits for ever.
        loop.call_later(5 * KILL_GRACE, self._end)
        self._fail_calls(self._reason)

    def _cut(self) -> None:
        if self._lifeline is not None:
            self._lifeline.cut()
        elif self._transport is not None:
            self._transport.abort()  # the root ends with its pipe

    @property
    def family(self) -> set[int]:
        """The pids of all processes that descend from the same root and are known here."""
        return set(self._family)

    async def sweep(self, folders: list[str]) -> int:
        """For the root: end its children that neither are known here nor belong to a world in one of `folders`."""
        return int(await self.call("sweep", keep=list(self._family), folders=folders))

    def _kill_by_pid(self) -> None:
        if not self.ended.done() and self._exit_status is None and self.pid:
            log.warning("%s (pid %d) did not die of its lifeline: SIGKILL", self.name, self.pid)
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def connection_lost(self, exc: Exception | None) -> None:
        self._pipe_ended = True
        if self._exit_status is not None:
            self._end()
        else:
            # It is dead and its reaper will say so any moment; or it lives and has closed its pipe; or its reaper died.
            asyncio.get_running_loop().call_later(EXIT_REPORT_GRACE, self._end_unreported)

    def _end_unreported(self, looks: int = 1) -> None:
        if self._exit_status is not None or self.ended.done():
            return
        if resident_memory(self.pid):
            self.kill("its process closed its pipe")
            asyncio.get_running_loop().call_later(2 * KILL_GRACE, self._end)
        elif looks < EXIT_REPORT_LOOKS:
            asyncio.get_running_loop().call_later(EXIT_REPORT_GRACE, self._end_unreported, looks + 1)
        else:
            self._end()

    def _exited(self, status: int) -> None:
        self._exit_status = status
        if self._pipe_ended:
            self._end()
        else:
            # An answer may still be in the pipe, before its end. A grandchild may hold the end open.
            asyncio.get_running_loop().call_later(PIPE_END_GRACE, self._end)

    def _end(self) -> None:
        if self.ended.done():
            return
        cause = self._reason
        if cause is None and self._exit_status is not None:
            cause = describe_exit(self._exit_status)
            if os.WIFSIGNALED(self._exit_status) and oom_kills() > self._oom_kills:
                cause += ", most likely by the kernel, as the machine ran out of memory"
        self.ended.set_result(cause or "its process is gone")
        self._family.pop(self.pid, None)
        self._cut()
        self._fail_calls(self.ended.result())
        if self._transport is not None:
            self._transport.abort()

    def _fail_calls(self, cause: str) -> None:
        self._unsent.clear()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(WorkerDied(cause))


def describe_exit(status: int) -> str:
    """What a wait status says, for people."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "signal"
        return f"its process was killed by {name} ({number})"
    return f"its process exited with code {os.waitstatus_to_exitcode(status)}"


async def start_root() -> WorkerProcess:
    """The process that all others descend from, and the only child of the server."""
    near, far = multiprocessing.Pipe(duplex=True)
    with near, far:
        popen = subprocess.Popen(  # noqa: ASYNC220 - once at start, and asyncio's would add a thread
            [sys.executable, "-m", "aioenv.pool.worker", str(far.fileno())],
            pass_fds=(far.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,  # the server's own stdout is for what it says itself
            start_new_session=True,  # Ctrl-C at the terminal is for the server alone
        )
        sock = socket.socket(fileno=os.dup(near.fileno()))
    root = WorkerProcess("the root process", Family(), sock, None)
    root.pid = popen.pid
    root.bears_children = True
    await root._connect()
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(popen.pid)

    def reap() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        code = popen.wait()
        root._exited(-code if code < 0 else code << 8)

    loop.add_reader(pidfd, reap)
    return root
