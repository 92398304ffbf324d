"""Setting AppWorld up by itself: its apps' code unpacked, and a data root to serve. Safe to run many at once."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# The demo data set's own version: raise it when what `demo.build` writes changes.
DEMO_VERSION = 1
APPS = ("admin", "amazon", "api_docs", "file_system", "gmail", "phone", "simple_note", "splitwise", "spotify",
        "supervisor", "todoist", "venmo")  # fmt: skip

Report = Callable[[str], None]


def unpack_apps(report: Report | None = None) -> None:
    """Unpack the apps' code, which the wheel brings encrypted, into the installed package. Does nothing if it is there.

    Raises ImportError where AppWorld is not installed, and PermissionError where its folder can't be written.
    """
    spec = importlib.util.find_spec("appworld")
    if spec is None or spec.origin is None:
        raise ImportError("AppWorld is not installed: pip install 'aioenv[appworld]', in a clone '.[appworld]'")
    package = Path(spec.origin).parent
    if _unpacked(package):
        return
    try:
        with _locked(package / ".aioenv-unpack.lock"):
            if not _unpacked(package):
                if report is not None:
                    report(f"unpacking AppWorld's apps in {package}")
                _unpack(package)
    except PermissionError as error:
        raise PermissionError(
            f"AppWorld's apps must be unpacked once in {package}, which can't be written ({error}):"
            " run `appworld install` as a user who can"
        ) from None


def _unpacked(package: Path) -> bool:
    return all((package / "apps" / app / "apis.py").is_file() for app in APPS)


def _unpack(package: Path) -> None:
    from appworld.common.constants import PASSWORD, SALT
    from appworld.common.utils import unpack_bundle

    bundle = package / ".source" / "apps.bundle"
    with tempfile.TemporaryDirectory(prefix=".aioenv-", dir=package) as folder:
        unpack_bundle(str(bundle), folder, PASSWORD, SALT)
        # A folder at a time: another process sees an app whole, or not at all.
        for source in sorted((Path(folder) / "apps").iterdir()):
            target = package / "apps" / source.name
            if not (target.is_dir() and source.is_dir()):
                source.rename(target)
            else:  # left half done by somebody else
                for file in source.rglob("*"):
                    if file.is_file():
                        place = target / file.relative_to(source)
                        place.parent.mkdir(parents=True, exist_ok=True)
                        file.replace(place)


def find_root(named: str | None, report: Report) -> Path:
    """The AppWorld root to serve: `named`, or if that is None the demo data, built if it is not there yet.

    Raises FileNotFoundError where `named` has no data: serving something else could go unnoticed by who trains on it.
    """
    if named:
        if (Path(named) / "data" / "datasets").is_dir():
            return Path(named).resolve()
        raise FileNotFoundError(
            f"{named}, named by --root or APPWORLD_ROOT, has no AppWorld data in data/. To fetch it: appworld download"
            f" data --root {named}. To serve aioenv's own demo data, name no root; to build it there: python -m aioenv"
            f" appworld demo-data {named}"
        )
    demo = cache_folder() / f"appworld-demo-{importlib.metadata.version('appworld')}-{DEMO_VERSION}"
    there = (demo / "data").is_dir()
    report(f"no --root and no APPWORLD_ROOT: {'serving' if there else 'building'} aioenv's own DEMO data in {demo}")
    report("for AppWorld's real data: appworld download data --root DIR, then serve with --root DIR")
    if not there:
        demo.mkdir(parents=True, exist_ok=True)
        with _locked(demo / "build.lock"):
            if not (demo / "data").is_dir():
                for left in demo.glob(".data-*"):  # of a build that was ended
                    shutil.rmtree(left)
                _build_demo(demo)
    return demo


def _build_demo(root: Path) -> None:
    """In a process of its own: the engine keeps its databases in module state. It dies with this one."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from aioenv.envs.appworld.demo import build\n"
        "from aioenv.linux import die_with_parent\n"
        "die_with_parent(signal.SIGKILL, int(sys.argv[2]))\n"
        "build(Path(sys.argv[1]))\n"
        "os._exit(0)\n"  # the engine's objects take the interpreter minutes to tear down
    )
    command = [sys.executable, "-c", code, str(root), str(os.getpid())]
    environ = {**os.environ, "APPWORLD_ROOT": str(root)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the demo data could not be built in {root}:\n{done.stderr}")


def cache_folder() -> Path:
    """The user's folder for what can be built again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aioenv"


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
