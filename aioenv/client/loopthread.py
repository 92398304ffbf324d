"""The event loop of all synchronous clients of a process, in one daemon thread that the first call starts.

One for all clients: trainers make a client for each episode and hardly ever close it, so a thread and a loop for each
would be hundreds. The price is that what blocks this loop (`on_failure`, an asynchronous agent) blocks all of them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import os
import selectors
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from aioenv.client.transport import Transport

T = TypeVar("T")

# Seconds that an interrupted call has to end, and that open rollouts have at the interpreter's exit.
_CANCEL_GRACE = 10.0
_EXIT_GRACE = 5.0

_current: LoopThread | None = None
_exiting = False
_lock = threading.RLock()  # not a Lock: a signal handler may make a call while its own thread starts the loop
# Counts the forks that led to this process. What belongs to another generation is the parent's.
generation = 0


class NoLoop(RuntimeError):
    """There is no loop to run this in: it was the parent's, the interpreter is exiting, no thread can be started."""


class LoopThread:
    """Runs coroutines for other threads. `transports` are those that may have connections in this loop."""

    def __init__(self) -> None:
        """Raises OSError or RuntimeError where the process may open no more files or threads."""
        self.transports: set[Transport] = set()
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._stopping = False
        self._closing: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._main, name="aioenv-client", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            raise

    def _main(self) -> None:
        while not self._stopping:
            # asyncio lets these two out of the loop, also where a mere task raised them, such as an agent.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises. KeyboardInterrupt and the like in the waiting thread cancel it.

        Raises RuntimeError in the loop's own thread, and NoLoop where this loop no longer runs.
        """
        try:
            self.check()
        except RuntimeError:
            coroutine.close()
            raise
        future: Future[T] | None = None
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            return future.result()
        except BaseException:
            if future is None or not future.done():
                with contextlib.suppress(TimeoutError):
                    asyncio.run_coroutine_threadsafe(_cancel(coroutine), self._loop).result(_CANCEL_GRACE)
            raise

    def check(self) -> None:
        """Raise what `run` would raise of itself."""
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError(
                "a synchronous client can't be called from its own event loop's thread, where `on_failure` and "
                "asynchronous agents run: the call would wait for itself. Call it in asyncio.to_thread, or use "
                "aioenv.client.EnvClient"
            )
        if self is not _current:
            raise NoLoop("this was begun before a fork, and goes on in the parent: begin it anew in this process")
        _refuse_at_exit()

    def drop(self, transport: Transport) -> None:
        """Close it later. Waits for nothing and takes no lock: the garbage collector calls it at any moment."""
        if transport in self.transports:
            self._loop.call_soon_threadsafe(self._close, transport)

    def _close(self, transport: Transport) -> None:
        self.transports.discard(transport)
        task = self._loop.create_task(transport.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def stop(self) -> None:
        """For the exit: end rollouts that were left open, then the thread. Connections are left to the system."""
        # What is said from here on is said to nobody who could act on it.
        self._loop.call_soon_threadsafe(self._loop.set_exception_handler, lambda loop, context: None)
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result(_EXIT_GRACE)
        self._stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_EXIT_GRACE)

    def abandon(self) -> None:
        """For a forked process, which has neither the thread nor a right to its connections: let go of them unseen."""
        # Never to be finalised, not even at the interpreter's end: tasks would run their `finally`s, and connections
        # take leave of the server, or of the epoll set, which both are the parent's.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        # But while a copy of a connection is open, the server doesn't see the parent hang up.
        files = [key.fd for key in self._selector.get_map().values()]
        if isinstance(self._selector, selectors.EpollSelector):
            files.append(self._selector.fileno())
        for file in files:
            os.close(file)


async def _cancel(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Cancel what `run` runs and wait for its end, which may take a while: a session's releases its instance."""
    for task in asyncio.all_tasks():
        if task.get_coro() is coroutine:
            task.cancel()
            await asyncio.wait([task])


def current() -> LoopThread:
    """The loop of this process, started if need be. Raises as `run` does."""
    global _current
    if _current is None:
        _refuse_at_exit()
        with _lock:
            if _current is None:
                try:
                    _current = LoopThread()
                except (OSError, RuntimeError) as error:
                    raise NoLoop(f"no event loop could be started: {error}") from error
    _current.check()
    return _current


def _refuse_at_exit() -> None:
    if _exiting:
        if threading.current_thread().daemon:
            # In a moment it is frozen anyway; until then it would only spoil the exit with error messages.
            threading.Event().wait()
        raise NoLoop("the interpreter is exiting")


def drop(transport: Transport) -> None:
    """Close the connections of a client that is gone, unless they are the parent's."""
    if _current is not None:
        _current.drop(transport)


def without_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, as all of a closed client."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    coroutine.close()
    raise RuntimeError("the coroutine waits")


def _in_child() -> None:
    global _current, _lock, generation
    generation += 1
    _lock = threading.RLock()  # a thread that is not here may have held it
    inherited, _current = _current, None
    if inherited is not None:
        inherited.abandon()


def _at_exit() -> None:
    global _exiting
    _exiting = True
    if _current is not None:
        _current.stop()


os.register_at_fork(after_in_child=_in_child)
# At import, so that handlers that a trainer registers later run earlier: those may still make calls.
atexit.register(_at_exit)
