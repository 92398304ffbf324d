"""Request bodies, checked at the border. Pure."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Any

import orjson

from aioenv.errors import BadRequest, TooLarge
from aioenv.pool import jobs
from aioenv.pool.branches import MOST_BRANCHES
from aioenv.pool.wire import LARGE, load_json

# It becomes the name of a folder.
INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Each is remembered for as long as its instance.
_REQUEST_ID_LENGTH = 200
_JSON_TYPES = {
    str: "a string",
    dict: "an object",
    list: "a list",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


@dataclass(frozen=True)
class Request:
    """The keys of a POST body that the protocol knows; others are ignored.

    `messages` of a large body are JSON already, to be passed on as they are.
    """

    env_type: str | None
    task_id: str | None
    instance_id: str | None
    messages: dict[str, Any] | bytes
    params: dict[str, Any]
    request_id: str | None

    @property
    def instance(self) -> str:
        """Raises BadRequest where no instance is named."""
        if self.instance_id is None:
            raise BadRequest('"instance_id" is missing')
        return self.instance_id

    @property
    def task(self) -> str:
        """Raises BadRequest where no task is named."""
        if self.task_id is None:
            raise BadRequest('"task_id" is missing')
        return self.task_id


def parse(body: bytes) -> Request:
    """Raises BadRequest, naming the key and the type."""
    try:
        data = load_json(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadRequest(f"the body must be a JSON object, not {_JSON_TYPES[type(data)]}")
    instance_id = get(data, "instance_id", str)
    if instance_id is not None and not INSTANCE_ID.fullmatch(instance_id):
        raise BadRequest(
            f'"instance_id" must have 1 to 128 letters, digits, ".", "_" or "-" and begin with a letter or digit,'
            f" not {instance_id[:200]!r}"
        )
    request_id = get(data, "request_id", str)
    if request_id is not None and not 0 < len(request_id) <= _REQUEST_ID_LENGTH:
        raise BadRequest(f'"request_id" must have 1 to {_REQUEST_ID_LENGTH} characters, not {len(request_id)}')
    return Request(
        env_type=get(data, "env_type", str),
        task_id=get(data, "task_id", str),
        instance_id=instance_id,
        messages=get(data, "messages", dict) or {},
        params=get(data, "params", dict) or {},
        request_id=request_id,
    )


async def parse_large(body: bytes, bodies: jobs.Jobs) -> Request:
    """As `parse`, by a job, lest the event loop be held up. Raises TooLarge, too."""
    return Request(**await bodies.run(parse_job, body))


def parse_job(body: bytes) -> dict[str, Any]:
    """Job: the fields of the Request, with its messages in JSON."""

    def act() -> dict[str, Any]:
        request = parse(body)
        size = len(orjson.dumps(request.params))
        if size >= LARGE:
            raise TooLarge(f'"params" takes {size:,} bytes, over the limit of {LARGE:,}; "messages" may be larger')
        return {**vars(request), "messages": orjson.dumps(request.messages)}

    return jobs.answered(act)


def branch_ids(request: Request) -> list[str]:
    """The ids of a fork's copies: given, or made up, as many as `params.n`. Raises BadRequest.

    Those that are made up are the same for the same call, so that asking again makes no others.
    """
    ids, count = get(request.params, "instance_ids", list, "params."), get(request.params, "n", int, "params.")
    if ids is None:
        count = 1 if count is None else count
        if not 1 <= count <= MOST_BRANCHES:
            raise BadRequest(f'"params.n" must be from 1 to {MOST_BRANCHES}, not {count}')
        call = request.request_id or uuid.uuid4().hex
        return [uuid.uuid5(uuid.NAMESPACE_OID, f"{call} {request.instance} {number}").hex for number in range(count)]
    if not all(isinstance(name, str) and INSTANCE_ID.fullmatch(name) for name in ids) or len(set(ids)) != len(ids):
        raise BadRequest('"params.instance_ids" must be a list of different instance ids')
    if not 1 <= len(ids) <= MOST_BRANCHES or (count is not None and count != len(ids)):
        raise BadRequest(f'"params.instance_ids" must have as many ids as "params.n", 1 to {MOST_BRANCHES}')
    return list(ids)


def get(data: dict[str, Any], key: str, wanted: type, where: str = "") -> Any:
    """The key's value, None if it has none. Raises BadRequest for one of another type."""
    value = data.get(key)
    if value is None or type(value) is wanted:  # nearly always
        return value
    if wanted is float and type(value) is int:
        return float(value)
    raise BadRequest(f'"{where}{key}" must be {_JSON_TYPES[wanted]} or null, not {_JSON_TYPES[type(value)]}')
