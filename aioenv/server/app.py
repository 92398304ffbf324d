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

JSON = "application/json"


def make_app(pool: Pool) -> web.Application:
    """Routes over `pool`, which the caller starts and closes."""
    app = web.Application(client_max_size=pool.settings.limits.max_body, middlewares=[_failures])
    routes = Routes(pool)
    app.add_routes(
        [
            web.get("/healthz", routes.healthz),
            web.get("/readyz", routes.readyz),
            web.get("/instances", routes.instances),
            web.post("/get_env_profile", _post(routes.get_env_profile)),
            web.post("/create", _post(routes.create)),
            web.post("/step", _post(routes.step)),
            web.post("/evaluate", _post(routes.evaluate)),
            web.post("/get_info", _post(routes.get_info)),
            web.post("/release", _post(routes.release)),
        ]
    )
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
    return web.Response(body=orjson.dumps(body), status=status, content_type=JSON, headers=headers)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure is answered in the protocol's shape."""
    try:
        return await handler(request)
    except AioenvError as error:
        failure = error
    except web.HTTPRequestEntityTooLarge:
        failure = TooLarge(f"the body is over the limit of {request.client_max_size:,} bytes, which --max-body sets")
    except web.HTTPException as error:  # aiohttp's own: no such route, wrong method
        body = BadRequest(f"{request.method} {request.path}: {error.reason}").payload()
        return _json(body, error.status, {key: value for key, value in error.headers.items() if key == "Allow"})
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
