"""A file that keeps what clients log, for when the process that logged it is gone.

It is asked for by AIOENV_CLIENT_LOG, or by CLIENT_LOG_PATH, as AgentEvolver's own client knows it: the path of a file,
which is made, with its folders, and appended to. Each line is one warning (a failed try) or error (a failed call) of
the logger `aioenv.client`, with line breaks written as \\n, and is on disk a moment after it was logged:

2026-11-30 00:32:08,617 ERROR [4242] /step (instance_id i1) failed (3 tries, 9.1 s): connection_failed: …

logger ─▶ filter ─▶ queue ─▶ writer (one thread per process) ─▶ file
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import logging
import os
import sys
import threading
from queue import SimpleQueue

logger = logging.getLogger("aioenv.client")

_VARIABLES = ("AIOENV_CLIENT_LOG", "CLIENT_LOG_PATH")
_MOST_QUEUED = 1000
_LONGEST = 65_536  # characters of a message
_FORMAT = logging.Formatter("%(asctime)s %(levelname)s [%(process)s] %(message)s")
_EXIT_PATIENCE = 5.0  # seconds


class Writer:
    """Writes records to the file at `path`. It has no thread before the first one."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        # Not queue.Queue: that one deadlocks where a signal handler or a finalizer logs in the middle of its put.
        self._queue: SimpleQueue[logging.LogRecord | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._missing = 0
        self._torn = False
        self._told = ""

    def put(self, record: logging.LogRecord) -> None:
        """Queue a record, or count it as missing where the disk is far behind: never waits for it."""
        if threading.current_thread() is self._thread:
            return  # about the file itself
        if self._queue.qsize() >= _MOST_QUEUED:
            with self._lock:
                self._missing += 1
            return
        self._queue.put(copy.copy(record))  # as formatting writes to it, here and in other handlers
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="aioenv-client-log", daemon=True)
                thread.start()
                self._thread = thread
                _flush_in_workers()

    def flush(self, timeout: float) -> bool:
        """Wait until what was put so far was dealt with; False if that took over `timeout` seconds."""
        if self._thread is None:
            return True
        dealt_with = threading.Event()
        self._queue.put(dealt_with)
        return dealt_with.wait(timeout)

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            if records := [item for item in batch if isinstance(item, logging.LogRecord)]:
                self._write(records)
            for item in batch:
                if isinstance(item, threading.Event):
                    item.set()

    def _write(self, records: list[logging.LogRecord]) -> None:
        """Append them and sync. What can't be written is told once, and counted for a note once there is a file."""
        path, done = self.path, 0
        try:
            # Opened for each batch: the file may have been moved away, and a forked process inherits nothing.
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                self._note_missing(file)
                for record in records:
                    self._append(file, _line(record))
                    done += 1
                _sync(file)
            finally:
                os.close(file)
        except Exception as error:
            with self._lock:
                self._missing += len(records) - done
            if self._told != path:
                self._told = path
                with contextlib.suppress(Exception):
                    logger.warning("the error log %s can't be written (this is told once): %s", path, error)

    def _note_missing(self, file: int) -> None:
        with self._lock:
            missing = self._missing
        if missing:
            self._append(file, _line(_note(f"{missing} messages are missing here")))
            with self._lock:
                self._missing -= missing

    def _append(self, file: int, line: bytes) -> None:
        """In one write, which no other process's can tear."""
        data = b"\n" + line if self._torn else line
        written = os.write(file, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(record: logging.LogRecord) -> bytes:
    try:
        text = _FORMAT.format(record)
    except Exception as error:  # its arguments don't fit, or raise
        text = _FORMAT.format(_note(f"a message could not be formatted: {error!r}: {record.msg!r}"))
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}… ({len(text) - _LONGEST} more characters)"
    return ("\\n".join(text.splitlines()) + "\n").encode("utf-8", "backslashreplace")


def _note(text: str) -> logging.LogRecord:
    return logging.LogRecord(logger.name, logging.WARNING, __file__, 0, "%s", (text,), None)


def _sync(file: int) -> None:
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which is what /dev/stderr and the like say
            raise


_writer = Writer()


def _keep(record: logging.LogRecord) -> bool:
    """A filter, not a handler: with a handler, logging would no longer print to stderr where nothing is configured."""
    if record.levelno >= logging.WARNING:
        with contextlib.suppress(Exception):
            _writer.put(record)
    return True


def follow_environment() -> None:
    """Keep a log, from now on and for all clients of the process, if the environment says where. Never raises."""
    path = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
    if path:
        with contextlib.suppress(OSError):  # the working directory is gone
            path = os.path.abspath(path)
        _writer.path = path
        logger.addFilter(_keep)


def flush(timeout: float = _EXIT_PATIENCE) -> bool:
    """Wait until what was logged so far is on disk; False if that took over `timeout` seconds."""
    return _writer.flush(timeout)


def _flush_in_workers() -> None:
    """multiprocessing ends its workers without atexit, and forgets what was registered before their fork."""
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util.Finalize(None, flush, exitpriority=0)


def _in_child() -> None:
    global _writer
    _writer = Writer(_writer.path)  # what is queued in the old one is the parent's to write


os.register_at_fork(after_in_child=_in_child)
atexit.register(flush)
