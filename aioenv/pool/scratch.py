"""The folder that holds the instances' folders, and getting rid of folders, whatever was done to them.

A server locks its own for as long as it lives, so that the next one tells a dead server's leftovers by their lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioenv.errors import AtCapacity

log = logging.getLogger("aioenv.pool")

PREFIX = "aioenv-"
LOCK = "lock"


class Scratch:
    """A folder of this server's own, below `parent` (the system's temporary folder if None). Raises OSError."""

    def __init__(self, parent: Path | None) -> None:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = (self.path / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.why_full: str | None = None
        self.free_at_start = shutil.disk_usage(self.path).free
        for name in ("worlds", "groups", "templates"):
            (self.path / name).mkdir()

    def remove_leftovers(self) -> None:
        """Remove the folders of this user's servers that died without doing so themselves."""
        for folder in self.path.parent.glob(f"{PREFIX}*"):
            if folder != self.path and _is_left_over(folder):
                log.warning("removing %s, left behind by a server that was killed", folder)
                remove(folder)

    def refuse_if_full(self) -> None:
        """Raises AtCapacity where no more is to be put here."""
        if self.why_full is not None:
            raise AtCapacity(self.why_full)

    def new_world(self, instance_id: str) -> Path:
        """An empty folder for an instance, by its id unless what an earlier one left there can't be removed."""
        folder = self.path / "worlds" / instance_id
        remove(folder)
        if os.path.lexists(folder):
            folder = folder.with_name(f"{instance_id}~{time.time_ns()}")  # no id has a tilde
        folder.mkdir()
        return folder

    def close(self) -> None:
        remove(self.path)
        self._lock.close()


def _is_left_over(folder: Path) -> bool:
    try:
        if folder.stat().st_uid != os.getuid():
            return False
        with (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # no lock, so none of ours, or not yet; or locked by a living server
        return False


def remove(path: Path) -> None:
    """Remove a folder, or what a world has put in its place; links are not followed. What can't be is logged."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path, onerror=_make_writable)
    except OSError as error:
        log.error("%s could not be removed: %s", path, error)


def _make_writable(function: Callable[..., Any], path: str, error: Any) -> None:
    """The world may have taken permissions away: give them back, and try once more."""
    if isinstance(error[1], FileNotFoundError):
        return
    os.chmod(os.path.dirname(path), 0o700)
    if not os.path.islink(path):
        os.chmod(path, 0o700)
    if function in (os.open, os.scandir, os.lstat):  # a folder that could not be entered
        shutil.rmtree(path)
    else:
        function(path)
