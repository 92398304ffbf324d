"""The gold solution of a task, cut into the code blocks that an agent would send one per step."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

STEP_MARK = "# --- step"


def gold_steps(root: Path | str, task_id: str) -> list[str]:
    """Code blocks that solve the task when run in order in one world; the last one completes it.

    `root` is the folder that holds `data/`. Reads files only, no appworld. Raises FileNotFoundError if there is no
    such task, or if it comes without a solution, as the tasks of AppWorld's own test splits do.
    """
    tasks = Path(root) / "data" / "tasks"
    task = tasks / task_id
    # A task id is one plain path component; anything else could leave the tasks folder.
    if not re.fullmatch(r"\w+", task_id) or not task.is_dir():
        raise FileNotFoundError(f"no task {task_id!r} in {tasks}: the ids are listed in {tasks.parent / 'datasets'}")
    path = task / "ground_truth" / "compiled_solution.py"
    if not path.is_file():
        raise FileNotFoundError(
            f"task {task_id!r} has no gold solution ({path} is missing); AppWorld ships none for its test splits"
        )
    blocks = [block.strip("\n") for block in _body(path).split(STEP_MARK)]
    return [block for block in blocks if block.strip()]


def _body(path: Path) -> str:
    """The source of `def solution(...)` below its first line, dedented."""
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == "solution":
            # From the line after the signature, not from the first statement: a comment may come first.
            return textwrap.dedent("\n".join(text.splitlines()[_signature_end(node) : node.end_lineno]))
    raise FileNotFoundError(f"{path} defines no function named solution")


def _signature_end(node: ast.FunctionDef) -> int:
    """Number of the line on which the signature ends."""
    last = max((arg.end_lineno or arg.lineno for arg in node.args.args), default=node.lineno)
    return max(node.lineno, last)
