"""What the agent is told: the first messages, and the answer to `get_info`."""

from __future__ import annotations

from typing import Any

import jinja2

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("aioenv.envs.appworld", ""),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,
)


def system_prompt(supervisor: Any, *, simple: bool, example: bool) -> str:
    """`supervisor` has `first_name`, `last_name`, `email` and `phone_number`. Without `example`, only the header of
    the actual task."""
    return _render("system_prompt.jinja2", supervisor=supervisor, simple=simple, example=example)


def tool_info() -> str:
    return _render("tool_info.jinja2")


def _render(template: str, **values: Any) -> str:
    return _ENVIRONMENT.get_template(template).render(**values).strip()
