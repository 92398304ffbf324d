"""The training sample of `aioenv.schema.training`, from where it is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, StrictInt, StrictStr

from aioenv.schema._compat import before
from aioenv.schema._record import Record, plain

# Which two fields each joined field of a sample is made of: the first for the prompt, the second for the response.
_JOINED = {
    "input_ids": ("prompt_ids", "response_ids"),
    "attention_mask": ("prompt_attention_mask", "response_attention_mask"),
    "position_ids": ("prompt_position_ids", "response_position_ids"),
    "loss_mask": ("prompt_loss_mask", "response_loss_mask"),
}
_PARTS = [part for parts in _JOINED.values() for part in parts]


class PromptTooLong(ValueError, RuntimeError):
    """A sample's prompt is over a maximum. The text names the trainer's setting that would let it pass.

    Also a RuntimeError, as AgentEvolver raises for it.
    """


class Sample(Record):
    """What one training step learns from: a prompt, the response to it, and three lists of numbers along each.

    `prompt_ids` and the prompt's three lists are of one length, so are the response's. The joined `input_ids`,
    `attention_mask`, `position_ids` and `loss_mask` are a prompt's followed by a response's, and are built where they
    are not given. A mask's 1 means that the token is attended to, or trained on. The maxima are in tokens. An id may be
    given as an int, and None for any field means its default.

    Raises ValueError, which names the fields, if a list isn't one of ints or lengths disagree.
    """

    data_id: StrictStr = ""
    task_id: StrictStr = ""
    rollout_id: StrictStr = ""
    minor_index_id: StrictInt = 0
    messages: list[dict[str, Any]] = Field(default_factory=list)
    extras: dict[str, Any] = Field(default_factory=dict)
    input_ids: list[int] = Field(default_factory=list)
    prompt_ids: list[int] = Field(default_factory=list)
    response_ids: list[int] = Field(default_factory=list)
    attention_mask: list[int] = Field(default_factory=list)
    prompt_attention_mask: list[int] = Field(default_factory=list)
    response_attention_mask: list[int] = Field(default_factory=list)
    position_ids: list[int] = Field(default_factory=list)
    prompt_position_ids: list[int] = Field(default_factory=list)
    response_position_ids: list[int] = Field(default_factory=list)
    loss_mask: list[int] = Field(default_factory=list)
    prompt_loss_mask: list[int] = Field(default_factory=list)
    response_loss_mask: list[int] = Field(default_factory=list)
    reward_scores: dict[str, Any] = Field(default_factory=dict)
    max_prompt_len: int
    max_response_len: int
    max_model_len: int

    @before
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        fields = {name: value for name, value in data.items() if value is not None}
        for name in ("data_id", "task_id", "rollout_id"):
            if type(fields.get(name)) is int:
                fields[name] = str(fields[name])
        for name in ("max_prompt_len", "max_response_len", "max_model_len"):
            maximum = fields.get(name, 0)
            if type(maximum) is not int or maximum < 0:
                raise ValueError(f"{name} must be a whole number of tokens, 0 or more, not {maximum!r}")
        if isinstance(fields.get("messages"), list):
            fields["messages"] = [plain(message) for message in fields["messages"]]
        for name in _PARTS:
            fields.setdefault(name, [])
        _check_ints(fields, _PARTS)
        for name, (prompt, response) in _JOINED.items():
            fields.setdefault(name, fields[prompt] + fields[response])
        _check_ints(fields, _JOINED)
        _check_lengths(fields)
        return fields

    def truncate_output_ids(self) -> None:
        """Cut the response, with its masks and position ids, to what the maxima allow, and rebuild the joined fields.

        It keeps at most `max_response_len` tokens from the response's start, fewer if prompt and response together
        would be over `max_model_len`. A second call changes nothing. Raises PromptTooLong for a prompt over
        `max_prompt_len` or `max_model_len`, and ValueError as for a new sample; it then has changed nothing.
        """
        _check_ints(vars(self), [*_PARTS, *_JOINED])
        _check_lengths(vars(self))
        size = len(self.prompt_ids)
        for name, setting in (
            ("max_prompt_len", "data.max_prompt_length"),
            ("max_model_len", "actor_rollout_ref.rollout.max_model_len"),
        ):
            maximum = getattr(self, name)
            if size > maximum:
                raise PromptTooLong(f"prompt_ids has {size} tokens, over {name} {maximum}: increase {setting}")
        keep = min(self.max_response_len, self.max_model_len - size)
        for joined, (prompt, response) in _JOINED.items():
            setattr(self, response, getattr(self, response)[:keep])
            setattr(self, joined, getattr(self, prompt) + getattr(self, response))


def _check_ints(fields: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        numbers = fields[name]
        if not isinstance(numbers, list):
            raise ValueError(f"{name} must be a list of ints, not {type(numbers).__name__}")
        wrong = set(map(type, numbers)) - {int, bool}
        if wrong:
            raise ValueError(f"{name} must be a list of ints, but holds {', '.join(sorted(t.__name__ for t in wrong))}")


def _check_lengths(fields: Mapping[str, Any]) -> None:
    sizes = {name: len(fields[name]) for name in (*_PARTS, *_JOINED)}
    for parts in _JOINED.values():
        for part, ids in zip(parts, _JOINED["input_ids"], strict=True):
            if sizes[part] != sizes[ids]:
                raise ValueError(f"{part} has {sizes[part]} numbers, but {ids} has {sizes[ids]}")
    for joined, (prompt, response) in _JOINED.items():
        if sizes[joined] != sizes[prompt] + sizes[response]:
            raise ValueError(
                f"{joined} has {sizes[joined]} numbers, but {prompt} has {sizes[prompt]} and {response} has "
                f"{sizes[response]}"
            )
