"""The folder that holds the instances' folders, and getting rid of folders, whatever was done to them.

A server locks its own for as long as it lives, so that the next one tells a dead server's leftovers by their lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
import uuid
from pathlib import Path

from aioenv.errors import AtCapacity
from aioenv.pool.worldlog import LOG_NAME

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
        for name in ("worlds", "groups", "templates", "checkpoints"):
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

    def beside(self, instance_id: str) -> Path:
        """One more empty folder for an instance that has one."""
        folder = self.path / "worlds" / f"{instance_id}~{time.time_ns()}"
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


def copy_folder(source: Path, target: Path) -> None:
    """Copy what is in a world's folder into another's: files, folders and links, but not its log, pipes and sockets.

    A link into the source's folder will lead into the target's. Raises OSError.
    """
    for folder, names, files in os.walk(source):
        within = target / os.path.relpath(folder, source)
        for name in list(names):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                files.append(name)
                names.remove(name)
            else:
                (within / name).mkdir()
        for name in files:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                leads = os.readlink(path)
                inside = leads == str(source) or leads.startswith(f"{source}{os.sep}")
                os.symlink(str(target) + leads.removeprefix(str(source)) if inside else leads, within / name)
            elif os.path.isfile(path) and not (folder == str(source) and name == LOG_NAME):
                shutil.copy2(path, within / name, follow_symlinks=False)


def remove(path: Path) -> None:
    """Remove a folder, or what a world has put in its place; links are not followed. What can't be is logged."""
    for last_try in (False, True):
        try:
            if path.is_dir() and not path.is_symlink():
                _remove_folder(str(path))
            else:
                path.unlink(missing_ok=True)
            return
        except OSError as error:  # a process that is about to die may write there still
            if last_try:
                log.error("%s could not be removed: %s", path, error)
            time.sleep(0.05)


def _remove_folder(top: str) -> None:
    """However deep it is: what is deeper than a level is moved up first, so that no path and no recursion gets long."""
    top_fd = _open_folder(top)
    try:
        names, moved = [""], 0
        while names:
            name = names.pop()
            fd = _open_folder(name, top_fd) if name else os.dup(top_fd)
            try:
                for entry in os.listdir(fd):
                    if not stat.S_ISDIR(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode):
                        os.unlink(entry, dir_fd=fd)
                    elif name:
                        moved += 1
                        up = f".{moved}.{uuid.uuid4().hex}"
                        _make_movable(entry, fd)
                        os.rename(entry, up, src_dir_fd=fd, dst_dir_fd=top_fd)
                        names.append(up)
                    else:
                        names.append(entry)
            finally:
                os.close(fd)
            if name:
                os.rmdir(name, dir_fd=top_fd)
    finally:
        os.close(top_fd)
    os.rmdir(top)


def _open_folder(name: str, dir_fd: int | None = None) -> int:
    """With the permissions to empty it, which the world may have taken away."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        fd = os.open(name, flags, dir_fd=dir_fd)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=dir_fd)
        fd = os.open(name, flags, dir_fd=dir_fd)
    os.fchmod(fd, 0o700)
    return fd


def _make_movable(name: str, dir_fd: int) -> None:
    os.close(_open_folder(name, dir_fd))  # its link to its parent changes, which takes permissions
