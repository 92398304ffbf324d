"""AppWorld as it is, in a process of its own, with nothing of aioenv: what the service is compared with.

As a program (`python -P stock.py ROOT TASK`) it is that process, made like the Ray actor of AgentEvolver's service: a
new interpreter, `import appworld`, `AppWorld(task_id=…)`. It takes one JSON line a command on stdin, answers with one
on stdout, and ends with its stdin. Time is read by clock_gettime: the engine freezes the other clocks.
As a module it has `Stock`, which starts and drives such a process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

LIMIT = 300.0  # seconds for any answer


class Stock:
    """One such process, from construction on. A context manager; `ready` waits for its world."""

    def __init__(self, root: Path, task_id: str) -> None:
        # The engine writes below its root.
        self._folder = tempfile.TemporaryDirectory(prefix="aioenv-bench-")
        (Path(self._folder.name) / "data").symlink_to(root / "data")
        environ = {key: os.environ[key] for key in os.environ if key not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
        environ["PYTHONPYCACHEPREFIX"] = _bytecode().name
        command = [sys.executable, "-P", __file__, self._folder.name, task_id]
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=self._folder.name
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ready(self) -> Any:
        """What the world observes first."""
        return self._read()

    def call(self, op: str, **fields: Any) -> Any:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self._popen.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._popen.stdout is not None
        alarm = threading.Timer(LIMIT, self._popen.kill)
        alarm.start()
        try:
            line = self._popen.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            raise SystemExit(f"the stock engine's process ended, with code {self._popen.wait()}")
        return json.loads(line)

    def __enter__(self) -> Stock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
            if error is not None:
                self._popen.kill()
            self._popen.wait(20)
        finally:
            self._popen.kill()
            self._popen.wait()
            self._popen.stdout.close()
            self._folder.cleanup()


@functools.cache
def _bytecode() -> tempfile.TemporaryDirectory[str]:
    """Where the compiled modules are kept, for all these processes of a script.

    Some installations have no bytecode of AppWorld, and some machines forbid writing it: without this, the fresh
    process that the service is compared with would compile it all each time. The first one does, and is not counted.
    """
    return tempfile.TemporaryDirectory(prefix="aioenv-bench-bytecode-")


def warm_up(root: Path, task_id: str) -> None:
    """One process that is not counted: it fills the disk cache, and compiles."""
    with Stock(root, task_id) as stock:
        stock.ready()
        stock.call("evaluate")


# -- in the process ----------------------------------------------------------------------------------------------------


def main() -> None:
    os.environ["APPWORLD_ROOT"] = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stray prints are no answers

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    from appworld import AppWorld

    world = AppWorld(task_id=sys.argv[2], experiment_name="bench")
    answer(world.task.instruction)
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "step":
            answer(_step(world, command["code"]))
        elif command["op"] == "evaluate":
            tests = world.evaluate()
            answer(tests.pass_count / tests.num_tests)
        elif command["op"] == "new":
            world.close()
            world = AppWorld(task_id=command["task_id"], experiment_name="bench")
            answer(world.task.instruction)
    world.close()
    answers.flush()
    os._exit(0)  # without waiting for the engine's threads


def _step(world: Any, code: str) -> dict[str, Any]:
    began = time.clock_gettime(time.CLOCK_MONOTONIC)
    output = world.execute(code)
    done = world.task_completed()
    return {"seconds": time.clock_gettime(time.CLOCK_MONOTONIC) - began, "output": output, "done": done}


if __name__ == "__main__":
    main()
