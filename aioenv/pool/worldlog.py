"""`world.log`, where a world's stray output goes: read and cut from outside, whatever the world put in its place."""

from __future__ import annotations

import os
import stat
from pathlib import Path

LOG_NAME = "world.log"
# A log over this many bytes is cut to its end.
LOG_LIMIT = 4 * 2**20
_KEPT = 64 * 2**10
_CUT_NOTE = b"[aioenv: what was here before is cut off, the log was over its limit]\n"
_LAST_LINES = 10
_LAST_BYTES = 2000


def last_words(folder: Path | None) -> str:
    """The end of the log, as the end of a message about the world's death; empty if there is nothing to tell."""
    if folder is None:
        return ""
    fd = _open(folder, os.O_RDONLY)
    if fd is None:
        return ""
    try:
        text = _tail(fd, _LAST_BYTES).decode("utf-8", "replace").rstrip()
    finally:
        os.close(fd)
    return "; its last output was:\n" + "\n".join(text.splitlines()[-_LAST_LINES:]) if text else ""


def cut(folder: Path) -> bool:
    """Cut the log to its end if it is over its limit; whether it was. What is written meanwhile may be lost."""
    try:
        if os.lstat(folder / LOG_NAME).st_size <= LOG_LIMIT:
            return False
    except OSError:
        return False
    fd = _open(folder, os.O_RDWR | os.O_APPEND)
    if fd is None:
        return False
    try:
        tail = _tail(fd, _KEPT)
        os.ftruncate(fd, 0)  # its writers append, so they go on at the new end
        os.write(fd, _CUT_NOTE + tail)
    finally:
        os.close(fd)
    return True


def _open(folder: Path, flags: int) -> int | None:
    """The log, if it is a plain file of one name: a world may have put a link or a pipe there, or moved its folder."""
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fd = os.open(LOG_NAME, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
    except OSError:
        return None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return fd
    os.close(fd)
    return None


def _tail(fd: int, size: int) -> bytes:
    end = os.fstat(fd).st_size
    return os.pread(fd, size, max(0, end - size))
