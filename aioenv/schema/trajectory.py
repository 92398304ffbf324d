"""An episode as it is seen from the env's side. What a training step needs on top of it is another module's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, StrictStr

from aioenv.schema._compat import Model
from aioenv.schema.message import ActionMessage, Message, StateMessage


class Reward(Model):
    """A number that an env or its scoring gave, and `info`: whatever explains it."""

    value: float = 0.0
    info: dict[str, Any] = Field(default_factory=dict)


class Step(Model):
    """One action and what came of it. `reward` is that of this step alone."""

    action: ActionMessage
    state: list[StateMessage] = Field(default_factory=list)
    reward: float = 0.0
    is_terminated: bool = False
    info: dict[str, Any] = Field(default_factory=dict)


class Trajectory(Model):
    """An episode, filled in as it goes: `start` with a create's data, then `add` for each step's data.

    `state` is what `/create` showed, `steps` what followed. `reward` begins as the sum of the steps' rewards (the
    undiscounted return) and may be assigned, for instance from `/evaluate`. `info` is that of `/create`.
    """

    task_id: StrictStr = ""
    instance_id: StrictStr = ""
    env_type: StrictStr = ""
    state: list[StateMessage] = Field(default_factory=list)
    steps: list[Step] = Field(default_factory=list)
    reward: Reward = Field(default_factory=Reward)
    is_terminated: bool = False
    info: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def start(cls, data: Mapping[str, Any], *, env_type: str = "") -> Trajectory:
        """Begin from the `data` of `/create`. Raises ValueError if it hasn't that shape."""
        info = data.get("info") or {}
        return cls(
            task_id=info.get("task_id") or "",
            instance_id=info.get("instance_id") or "",
            env_type=env_type,
            state=data.get("state") or [],
            reward=Reward(value=data.get("reward") or 0.0),
            is_terminated=data.get("is_terminated") or False,
            info=info,
        )

    def add(self, action: ActionMessage | Mapping[str, Any], data: Mapping[str, Any]) -> Step:
        """Append an action and the `data` that `/step` gave for it; returns the new step.

        Adds the step's reward to `reward`. Raises ValueError, and changes nothing, if either hasn't its shape or the
        episode is over.
        """
        if self.is_terminated:
            raise ValueError(f"the episode of task {self.task_id!r} ended after {len(self.steps)} steps")
        step = Step(
            action=action if isinstance(action, ActionMessage) else ActionMessage(**action),
            state=data.get("state") or [],
            reward=data.get("reward") or 0.0,
            is_terminated=data.get("is_terminated") or False,
            info=data.get("info") or {},
        )
        self.steps.append(step)
        self.reward = Reward(value=self.reward.value + step.reward, info=self.reward.info)
        self.is_terminated = step.is_terminated
        return step

    def messages(self) -> list[Message]:
        """The whole conversation in order: the first state, then each action and what it led to."""
        conversation: list[Message] = list(self.state)
        for step in self.steps:
            conversation += [step.action, *step.state]
        return conversation


class Sample(Model):
    """A task with the conversation that an agent had on it: the unit that training data is kept in."""

    task_id: StrictStr
    env_type: StrictStr = ""
    messages: list[Message] = Field(default_factory=list)
    reward: Reward = Field(default_factory=Reward)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory) -> Sample:
        """The trajectory's task, conversation and reward; `metadata` names the instance."""
        return cls(
            task_id=trajectory.task_id,
            env_type=trajectory.env_type,
            messages=trajectory.messages(),
            reward=trajectory.reward,
            metadata={"instance_id": trajectory.instance_id, "is_terminated": trajectory.is_terminated},
        )
