"""What a trainer holds: tasks, scored episodes, and the token ids and masks of one training sample.

Names, fields and defaults are those of AgentEvolver's own schema, so that its trainer can use these in place of it.
`Reward`, `Sample` and `Trajectory` are other classes than the env-side ones of `aioenv.schema`: import them from here.
Token ids and masks are lists of ints; nothing here knows of tensors or tokenizers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import Field, StrictStr

from aioenv.schema._compat import before
from aioenv.schema._record import Record, own, plain
from aioenv.schema._sample import PromptTooLong, Sample
from aioenv.schema.message import Message

__all__ = [
    "PromptTooLong",
    "Reward",
    "Sample",
    "Task",
    "TaskObjective",
    "Trajectory",
    "convert_tool_to_user_message",
]


class Task(Record):
    """One task to train on.

    `query` is None for the env's own wording; any other text takes its place. `open_query` tells that the task has no
    clear end, so the model decides when it is done. `ground_truth` is a reference solution for graders that want one,
    and `evaluator` names the grader; "env" is the env's own scoring.
    """

    task_id: StrictStr
    env_type: StrictStr = "appworld"
    open_query: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)
    query: StrictStr | None = None
    ground_truth: StrictStr | None = None
    evaluator: StrictStr = "env"


class TaskObjective(Record):
    """A task that was found or made up, with how sure its maker is of it and what it earned.

    It has a copy of the task that it was given, so setting `ground_truth` leaves that one alone. A `ground_truth` given
    beside a task that has none becomes the task's: older data files are written so.
    """

    task: Task
    confidence: float | None = Field(default=None, allow_inf_nan=False)
    reward: float | None = Field(default=None, allow_inf_nan=False)

    @before
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        fields = dict(data)
        task, truth = fields.get("task"), fields.pop("ground_truth", None)
        if not isinstance(truth, str | None):
            raise ValueError(f"ground_truth must be a text, not {type(truth).__name__}")
        if isinstance(task, Task):
            fields["task"] = task = copy.copy(task)
            if task.ground_truth is None:
                task.ground_truth = truth
        elif isinstance(task, Mapping) and task.get("ground_truth") is None:
            fields["task"] = {**task, "ground_truth": truth}
        return fields

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "ground_truth":  # pydantic 1 has no place for a property's setter
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def objective(self) -> str | None:
        """The task's query."""
        return self.task.query

    @property
    def ground_truth(self) -> str | None:
        """The task's ground truth, and sets it too."""
        return self.task.ground_truth

    @ground_truth.setter
    def ground_truth(self, value: str | None) -> None:
        self.task.ground_truth = value


class Reward(Record):
    """How an episode was scored; all numbers must be finite.

    `outcome` is the score, `success_rate` the share of successes (for one episode 0 or 1), and `madness` a penalty for
    degenerate text, 0 where there is none. `description` tells a reader how to take the outcome, or why it is what it
    is.
    """

    outcome: float = Field(default=0.0, allow_inf_nan=False)
    success_rate: float = Field(default=0.0, allow_inf_nan=False)
    madness: float = Field(default=0.0, allow_inf_nan=False)
    description: StrictStr = "The outcome is 1 for a success and 0 for a failure."
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def success(self) -> bool:
        """Whether the outcome is above 0, so a part of the full score counts."""
        return self.outcome > 0


class Trajectory:
    """One episode as the trainer sees it; `reward` is None until it is scored.

    A plain class, since trainers make context managers of it: a subclass may have any attributes, and may compute
    `steps` in a property of its own. `steps`, its messages and `metadata` are copied as they are given. `reward` may be
    the dict of one. Raises ValueError for a step that is no message and a dict that is no reward.
    """

    steps: list[dict[str, Any]]

    def __init__(
        self,
        data_id: str = "",
        rollout_id: str = "",
        steps: Iterable[Mapping[str, Any] | Message] | None = None,
        query: str = "",
        is_terminated: bool = False,
        reward: Reward | Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.data_id = data_id
        self.rollout_id = rollout_id
        if steps is not None or not hasattr(type(self), "steps"):
            self.steps = [plain(step) for step in steps or ()]
        self.query = query
        self.is_terminated = is_terminated
        self.reward: Reward | None = Reward(**reward) if isinstance(reward, Mapping) else reward
        self.metadata = dict(metadata or {})

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__ = own(vars(self))
        return twin

    def copy(self, deep: bool = False) -> Self:
        """A copy with lists, dicts and a reward of its own; what is inside of these is shared unless `deep`."""
        return copy.deepcopy(self) if deep else copy.copy(self)

    def to_dict(self) -> dict[str, Any]:
        """The seven fields as plain JSON types; `Trajectory(**that)` is the same episode.

        Raises TypeError or ValueError where `steps` or `metadata` holds something that JSON has no form for.
        """
        names = ("data_id", "rollout_id", "steps", "query", "is_terminated", "metadata")
        fields = {name: getattr(self, name) for name in names}
        record: dict[str, Any] = json.loads(json.dumps(fields))
        record["reward"] = None if self.reward is None else self.reward.to_dict()
        return record

    @property
    def success(self) -> bool:
        """Whether it was scored, and its outcome is above 0."""
        return self.reward is not None and self.reward.success


def convert_tool_to_user_message(
    tool_message: dict[str, Any], tokenizer: Any = None, format: str = "qwen"
) -> dict[str, Any]:
    """A tool's reply as the user message that it is for chat templates without a tool role.

    `{"role": "tool", …}` becomes `{"role": "user", "content": text}`: the text of each `result` among its `tool_calls`,
    one to a line, or its own `content` where there is no result. Any other message is returned as it is. Only the
    format "qwen" is known, others raise ValueError. `tokenizer` is for callers that pass one, and isn't used; a text
    in its place is the format.
    """
    known = tokenizer if isinstance(tokenizer, str) else format
    if known != "qwen":
        raise ValueError(f"the format of a tool message must be 'qwen', not {known!r}")
    if tool_message.get("role") != "tool":
        return tool_message
    results = [call.get("result") for call in tool_message.get("tool_calls") or ()]
    texts = [str(result) for result in results if result is not None]
    content = tool_message.get("content")
    return {"role": "user", "content": "\n".join(texts or ["" if content is None else str(content)])}
