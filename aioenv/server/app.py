"""The aiohttp application: each route of the protocol, and what its failures look like."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from aioenv.errors import AioenvError, BadRequest, Busy, InternalError, TooLarge
from aioenv.pool.pool import Pool
from aioenv.server.request import Request, parse

log = logging.getLogger("aioenv.server")

JSON = {"Content-Type": "application/json"}


def make_app(pool: Pool) -> web.Application:
    """Routes over `pool`, which the caller starts and closes."""
    app = web.Application(client_max_size=pool.settings.limits.max_body)
    routes = Routes(pool)
    gets = {"/healthz": routes.healthz, "/readyz": routes.readyz, "/instances": routes.instances}
    posts = {
        "/get_env_profile": routes.get_env_profile,
        "/create": routes.create,
        "/step": routes.step,
        "/evaluate": routes.evaluate,
        "/get_info": routes.get_info,
        "/release": routes.release,
    }
    app.add_routes([web.get(path, _answered(handler)) for path, handler in gets.items()])
    app.add_routes([web.post(path, _answered(_post(handler))) for path, handler in posts.items()])
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
    """One method a route. Those behind POST get a checked `Request` and return the reply's body."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    async def healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def readyz(self, _: web.Request) -> web.Response:
        readiness = self.pool.readiness()
        return _json(readiness, 200 if readiness["ready"] else 503)

    async def instances(self, _: web.Request) -> web.Response:
        return _json(await self.pool.describe())

    async def get_env_profile(self, request: Request) -> dict[str, Any]:
        split = request.params.get("split", "train")
        if not isinstance(split, str):
            raise BadRequest('"params.split" must be a string')
        return _success(await self.pool.task_ids(request.env_type, split, request.params))

    async def create(self, request: Request) -> dict[str, Any]:
        reply = await self.pool.create(request.env_type, request.task, request.instance_id, request.params)
        return _success(reply)

    async def step(self, request: Request) -> dict[str, Any]:
        return _success(await self.pool.instance(request.instance).step(request.messages, request.params))

    async def evaluate(self, request: Request) -> dict[str, Any]:
        return _success(await self.pool.instance(request.instance).evaluate(request.messages, request.params))

    async def get_info(self, request: Request) -> dict[str, Any]:
        return _success(await self.pool.instance(request.instance).get_info(request.messages, request.params))

    async def release(self, request: Request) -> dict[str, Any]:
        return {"success": await self.pool.release(request.instance), "data": None}


def _post(route: Callable[[Request], Awaitable[dict[str, Any]]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(http: web.Request) -> web.Response:
        return _json(await route(parse(await http.read())))

    return handle


def _success(data: Any) -> dict[str, Any]:
    return {"success": True, "data": data}


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers={**JSON, **headers} if headers else JSON)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
