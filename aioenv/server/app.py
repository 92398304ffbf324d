"""The aiohttp application: each route of the protocol, and what its failures look like."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from aioenv import __version__
from aioenv.errors import AioenvError, BadRequest, Busy, InternalError, TooLarge
from aioenv.pool.pool import Pool
from aioenv.pool.process import PIECE
from aioenv.pool.replay import Reply
from aioenv.pool.wire import LARGE
from aioenv.server.request import Request, branch_ids, get, parse, parse_large

log = logging.getLogger("aioenv.server")

# The version tells a client that this server keeps replies by request_id, so that a step may be sent again. It is not
# with each step, for the time that takes.
JSON = {"Content-Type": "application/json", "Aioenv-Version": __version__}

HungUp = Callable[[], bool]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = Callable[[Request, HungUp], Awaitable[Reply | web.Response]]

_BEFORE, _AFTER = b'{"success":true,"data":', b"}"


def make_app(pool: Pool) -> web.Application:
    """Routes over `pool`, which the caller starts and closes."""
    app = web.Application(client_max_size=pool.settings.limits.max_body)
    routes = Routes(pool)
    gets = {
        "/healthz": routes.healthz,
        "/readyz": routes.readyz,
        "/instances": routes.instances,
        "/checkpoints": routes.checkpoints,
    }
    posts: dict[str, Route] = {
        "/get_env_profile": routes.get_env_profile,
        "/create": routes.create,
        "/step": routes.step,
        "/evaluate": routes.evaluate,
        "/get_info": routes.get_info,
        "/release": routes.release,
        "/fork": routes.fork,
        "/checkpoint": routes.checkpoint,
        "/restore": routes.restore,
    }
    app.add_routes([web.get(path, _answered(handler)) for path, handler in gets.items()])
    plain = {"Content-Type": "application/json"}
    for path, handler in posts.items():
        headers = JSON if path == "/create" else plain
        app.router.add_post(path, _answered(_post(handler, pool, headers)))
    allowed = {**dict.fromkeys(gets, "GET,HEAD"), **dict.fromkeys(posts, "POST")}

    async def no_route(request: web.Request) -> web.Response:
        if request.path in allowed:
            methods = allowed[request.path]
            failure = BadRequest(f"{request.path} takes {methods}, not {request.method}")
            return _json(failure.payload(), 405, {"Allow": methods})
        return _json(BadRequest(f"there is no {request.path}; there is: {', '.join(allowed)}").payload(), 404)

    app.router.add_route("*", "/{path:.*}", no_route)
    return app


class Routes:
    """One method a route. Those behind POST get a checked `Request` and what tells whether its client is gone, and
    return the reply's data, or the reply."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="OK", headers={"Aioenv-Version": __version__})

    async def readyz(self, _: web.Request) -> web.Response:
        readiness = self.pool.readiness()
        return _json(readiness, 200 if readiness["ready"] else 503)

    async def instances(self, _: web.Request) -> web.Response:
        return _json(await self.pool.describe())

    async def checkpoints(self, _: web.Request) -> web.Response:
        return _json(self.pool.branches.describe())

    async def get_env_profile(self, request: Request, _: HungUp) -> web.Response:
        split = request.params.get("split", "train")
        if not isinstance(split, str):
            raise BadRequest('"params.split" must be a string')
        return _json({"success": True, "data": await self.pool.task_ids(request.env_type, split, request.params)})

    async def create(self, request: Request, hung_up: HungUp) -> Reply:
        return await self.pool.create(
            request.env_type, request.task, request.instance_id, request.params, request.request_id, hung_up
        )

    async def step(self, request: Request, _: HungUp) -> Reply:
        return await self.pool.call("step", request.instance, request.messages, request.params, request.request_id)

    async def evaluate(self, request: Request, _: HungUp) -> Reply:
        return await self._call("evaluate", request)

    async def get_info(self, request: Request, _: HungUp) -> Reply:
        return await self._call("get_info", request)

    async def _call(self, op: str, request: Request) -> Reply:
        return await self.pool.call(op, request.instance, request.messages, request.params, request.request_id)

    async def fork(self, request: Request, _: HungUp) -> Reply:
        return await self.pool.fork(request.instance, branch_ids(request), request.request_id)

    async def checkpoint(self, request: Request, _: HungUp) -> Reply:
        keep = get(request.params, "keep", bool, "params.") or False
        ttl = get(request.params, "ttl", float, "params.")
        if ttl is not None and not 0 < ttl < float("inf"):
            raise BadRequest(f'"params.ttl" must be a number of seconds over 0, not {ttl!r}')
        return await self.pool.checkpoint(request.instance, keep, ttl, request.request_id)

    async def restore(self, request: Request, _: HungUp) -> Reply:
        name = get(request.params, "checkpoint", str, "params.")
        return await self.pool.restore(request.instance, name, request.request_id)

    async def release(self, request: Request, _: HungUp) -> web.Response:
        return _json({"success": await self.pool.release(request.instance, request.request_id), "data": None})


def _post(route: Route, pool: Pool, headers: dict[str, str]) -> Handler:
    async def handle(http: web.Request) -> web.StreamResponse:
        body = await http.read()
        request = parse(body) if len(body) < LARGE else await parse_large(body, pool.bodies)
        reply = await route(request, lambda: http.transport is None)
        if isinstance(reply, web.Response):
            return reply
        # With the time in the queue and in the world, in milliseconds (https://www.w3.org/TR/server-timing/).
        timing = "queue;dur=%.3f, world;dur=%.3f" % (reply.queued * 1000, reply.ran * 1000)  # noqa: UP031 - the fastest
        told = {**headers, "Server-Timing": timing}
        if len(reply.data) <= LARGE:
            return web.Response(body=b"".join((_BEFORE, reply.data, _AFTER)), headers=told)
        return await _piecewise(http, reply.data, told)

    return handle


async def _piecewise(http: web.Request, data: bytes, headers: dict[str, str]) -> web.StreamResponse:
    """As the client takes it: to write it at once would hold up the others."""
    response = web.StreamResponse(headers=headers)
    response.content_length = len(_BEFORE) + len(data) + len(_AFTER)
    await response.prepare(http)
    await response.write(_BEFORE)
    view = memoryview(data)
    for start in range(0, len(view), PIECE):
        await response.write(view[start : start + PIECE])
    await response.write_eof(_AFTER)
    return response


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers={**JSON, **headers} if headers else JSON)


def _answered(handler: Handler) -> Handler:
    """Every failure is answered in the protocol's shape. Not a middleware: that would cost each request more."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except AioenvError as error:
            failure = error
        except web.HTTPRequestEntityTooLarge:
            failure = TooLarge(
                f"the body is over the limit of {request.client_max_size:,} bytes, which --max-body sets"
            )
        except ConnectionResetError:
            return web.Response(status=400)  # the client went away amid its body: nobody reads this
        except (web.RequestPayloadError, HttpProcessingError) as error:
            reply = _json(BadRequest(f"the body can't be read: {error}").payload(), 400)
            reply.force_close()  # where the next request would begin can't be told
            return reply
        except Exception as error:
            log.exception("%s %s failed inside aioenv", request.method, request.path)
            failure = InternalError(f"aioenv failed: {error!r}; the server's log has the traceback")
        headers = {"Retry-After": str(failure.retry_after)} if isinstance(failure, Busy) else None
        return _json(failure.payload(), failure.status or 500, headers)

    return answer
