"""The HTTP face of the gateway: OpenAI's routes as raw ASGI, everything else in starlette (ING-1).

The hot routes are plain ASGI functions, because a framework's request and response objects cost more than all our own
work. A client that leaves is known of in the moment its connection ends: while tokens are counted, while the request is
queued, while its model wakes, and during the answer, streamed or not (PAINS A1 to A3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api.answer_parts import Translation
from broker.api.openai_answers import error_body
from broker.api.openapi import document
from broker.core.requests.admission import ModelView
from broker.gateway.exchange import Ask, Exchange, Failed, unavailable
from broker.gateway.keys import ANYONE, ApiKeys, Caller
from broker.gateway.metrics import CONTENT_TYPE
from broker.gateway.post_routes import NO_POST, POST_ROUTES, PostRoute
from broker.gateway.sse_stream import SseStream
from broker.http.cycle import CYCLE, HttpCycle, internal_error
from subjects.errors import ApiError, place_of

if TYPE_CHECKING:
    from broker.gateway.gateway import Gateway

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

OPEN_ROUTES = ("/health", "/ready")
"""Answered without an API key; they tell nothing but one word."""
BODY_READ_S_MAX = 60.0
"""A body that trickles in slower than this is refused (PAINS O7)."""
DISCARDED_BYTES_MAX = 64 * 1024 * 1024
"""Read and thrown away of a body that is too large: a client that is still writing would not see our answer otherwise."""
_JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
_UNUSED_HEADERS = frozenset({b"host", b"user-agent", b"accept", b"accept-encoding", b"accept-language", b"connection"})
"""Every client sends these, and OpenAI's own a dozen of ``x-stainless-*`` more; nobody here asks for them."""
_SSE: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class HttpOptions(msgspec.Struct, frozen=True):
    """How the HTTP face behaves."""

    body_bytes_max: int = 8 * 1024 * 1024
    bodies_bytes_max: int = 1024 * 1024 * 1024
    """Of all bodies that are held at once, each from its first byte to the end of its answer."""
    sse_open_after_s: float = 5.0
    """Until then a stream's headers are held back, so that an early error keeps its HTTP status (PAINS A7)."""
    keep_alive_s: float = 5.0
    """Then comments at this interval keep proxies from cutting the connection (PAINS A9)."""


log = structlog.get_logger(__name__)


class _ClientGone(Exception):
    """The connection closed before the body was complete."""


class HttpApp:
    """The ASGI application."""

    def __init__(
        self,
        gateway: Gateway,
        options: HttpOptions,
        keys: ApiKeys | None,
        metrics: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        """``metrics`` gives what ``/metrics`` says, where that is more than the gateway's own figures."""
        self._gateway = gateway
        self._options = options
        self._keys = keys
        self._bodies_bytes = 0
        self._rest = _rest_of_the_routes(gateway, metrics)

    def error_body(self, error: ApiError) -> bytes:
        """What HTTP itself refuses, in OpenAI's shape."""
        return error_body(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        """One HTTP exchange."""
        path: str = scope["path"]
        headers = _headers(scope)
        route = POST_ROUTES.get(path, NO_POST)
        caller = ANYONE
        if self._keys is not None and path not in OPEN_ROUTES:
            # Before routing: without a key, no path tells whether it exists (PAINS O1).
            try:
                caller = self._keys.caller(route.key(headers))
            except ApiError as error:
                await _send_error(send, error, route)
                return
        if route is NO_POST:
            await self._rest(scope, receive, send)
        elif scope["method"] != "POST":
            await _send_error(send, _method_not_allowed(), route, [(b"allow", b"POST")])
        else:
            cycle: HttpCycle = scope[CYCLE]
            try:
                await self._post(route, caller, headers, cycle, send)
            finally:
                self._forget_body(cycle)
                cycle.on_gone = None

    async def _post(self, route: PostRoute, caller: Caller, headers: dict[str, str], cycle: HttpCycle, send: Send) -> None:
        try:
            _check_content_type(headers)
            body = await self._read_body(headers, cycle)
            if route.answer_here is not None:
                answer = await route.answer_here(self._gateway.tokenized, body)
                await _send(send, 200, answer, [_JSON])
                return
            translation = route.translate(body)
            ask = Ask(route.endpoint, translation.body, caller.tenant, caller.sla_class, headers)
            exchange = await self._gateway.open(ask)
        except ApiError as error:
            await _send_error(send, error, route)
            return
        except _ClientGone:
            return
        except Exception as error:
            log.error("a request could not be answered", error=place_of(error))
            await _send_error(send, internal_error(), route)
            return
        cycle.on_gone = exchange.leave
        if cycle.gone:
            exchange.leave()
        try:
            if exchange.stream:
                await self._stream(exchange, translation, cycle, send, route)
            else:
                await _whole(exchange, translation, send, route)
        finally:
            exchange.leave()

    async def _read_body(self, headers: dict[str, str], cycle: HttpCycle) -> bytes:
        limit = self._options.body_bytes_max
        whole = cycle.body_now()
        if whole is not None and len(whole) <= limit:
            self._hold_body(cycle, len(whole))
            return whole
        too_large = ApiError(413, f"The request body is over the limit of {limit} bytes.", code="request_too_large")
        if whole is not None:
            raise too_large
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced) > (limit if "expect" in headers else DISCARDED_BYTES_MAX):
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_READ_S_MAX):
                while True:
                    message = await cycle.receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
                        self._hold_body(cycle, len(part))
                    else:
                        parts.clear()
                        self._forget_body(cycle)
                        if size > DISCARDED_BYTES_MAX:
                            raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(408, "The request body did not arrive in time.", code="request_timeout") from None
        if size > limit:
            raise too_large
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _hold_body(self, cycle: HttpCycle, size_bytes: int) -> None:
        cycle.held_bytes += size_bytes
        self._bodies_bytes += size_bytes
        if self._bodies_bytes > self._options.bodies_bytes_max:
            raise unavailable("This gateway holds as many bytes of requests as it takes.", "overloaded")

    def _forget_body(self, cycle: HttpCycle) -> None:
        self._bodies_bytes -= cycle.held_bytes
        cycle.held_bytes = 0

    async def _stream(
        self, exchange: Exchange, translation: Translation, cycle: HttpCycle, send: Send, route: PostRoute
    ) -> None:
        """Server-sent events. Headers go out with the first output or after ``sse_open_after_s``, whichever comes first."""
        await exchange.wait(self._options.sse_open_after_s)
        if exchange.left:
            return
        end = exchange.end_if_read()
        if isinstance(end, Failed):
            await _send_error(send, end.error, route, _about(exchange, route))
            return
        await send({"type": "http.response.start", "status": 200, "headers": _SSE + _about(exchange, route)})
        await SseStream(exchange, cycle, translation.writer, self._options.keep_alive_s).run()


async def _whole(exchange: Exchange, translation: Translation, send: Send, route: PostRoute) -> None:
    if (told := await exchange.whole()) is None:
        return
    about = _about(exchange, route)
    if isinstance(told, Failed):
        await _send_error(send, told.error, route, about)
        return
    try:
        answer = translation.writer(exchange.head, exchange.input_tokens).whole(*told)
    except ApiError as error:
        await _send_error(send, error, route, about)
    else:
        await _send(send, 200, answer, [_JSON, *about])


# ---------------------------------------------------------------------------------------------------------- other routes


def _rest_of_the_routes(gateway: Gateway, all_metrics: Callable[[], Awaitable[bytes]] | None) -> Starlette:
    """What is here has its line in :mod:`broker.api.openapi` too; a test compares the two."""

    def get(path: str, answer: Callable[[Request], Response]) -> Route:
        async def endpoint(request: Request) -> Response:
            return answer(request)

        return Route(path, endpoint)

    def model(view: ModelView, state: str) -> dict[str, Any]:
        record = view.record
        return {
            "id": view.name,
            "object": "model",
            "created": gateway.started_unix_s,
            "owned_by": "carpool",
            "root": record.name,
            "parent": record.name if view.adapter is not None else None,
            "state": state,
            "max_model_len": record.max_context_len,
            "tags": record.tags,
            "task": record.task,
        }

    def models(request: Request) -> Response:
        return _json({"object": "list", "data": [model(view, state) for view, state in gateway.model_states()]})

    def ready(request: Request) -> Response:
        reason = gateway.unready_reason()
        return _json({"status": reason or "ready"}, 503 if reason else 200)

    async def metrics(request: Request) -> Response:
        text = gateway.metrics_text() if all_metrics is None else await all_metrics()
        return Response(text, media_type=CONTENT_TYPE)

    unknown = ApiError(404, "Unknown request URL. See /openapi.json for what is served.", code="unknown_url")
    return Starlette(
        routes=[
            get("/v1/models", models),
            get("/v1/models/{name:path}", lambda request: _json(model(*gateway.state_of(request.path_params["name"])))),
            get("/health", lambda _: _json({"status": "alive", "bus": "connected" if gateway.bus_connected else "lost"})),
            get("/ready", ready),
            Route("/metrics", metrics),
            get("/pool", lambda _: _json(gateway.digest)),
            get("/openapi.json", lambda _: _json(msgspec.Raw(document()))),
        ],
        exception_handlers={
            ApiError: _told(),
            404: _told(unknown),
            405: _told(_method_not_allowed(), allow="GET"),
            Exception: _told(internal_error()),
        },
    )


def _told(error: ApiError | None = None, **headers: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Answers with this error, or else with the one that was raised."""

    async def handler(request: Request, raised: Exception) -> Response:
        told = error or raised
        assert isinstance(told, ApiError)
        return Response(error_body(told), told.status, headers, media_type="application/json")

    return handler


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


# --------------------------------------------------------------------------------------------------------------- helpers


def _headers(scope: Scope) -> dict[str, str]:
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name not in _UNUSED_HEADERS and not name.startswith(b"x-stainless-")
    }


def _check_content_type(headers: dict[str, str]) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = "Send the request body as JSON, with the header 'Content-Type: application/json'."
        raise ApiError(415, message, code="unsupported_media_type")


def _method_not_allowed() -> ApiError:
    return ApiError(405, "This method is not allowed here.", code="method_not_allowed")


def _about(exchange: Exchange, route: PostRoute) -> Headers:
    """The headers that say who answered. All values are our own ids, numbers and configured names."""
    waited_ms = None if exchange.queue_wait_s is None else round(exchange.queue_wait_s * 1000)
    told: list[tuple[bytes, object]] = [
        (b"x-request-id", exchange.request),  # where OpenAI's SDKs look for it
        (b"x-carpool-request-id", exchange.request),
        (b"x-carpool-model", exchange.model),
        (b"x-carpool-replica", exchange.replica),
        (b"x-carpool-attempt", None if exchange.replica is None else exchange.attempt),
        (b"x-carpool-queue-wait-ms", waited_ms),
        (b"x-carpool-prefix-tokens", exchange.prefix_tokens or None),
        (b"x-carpool-degraded-from", exchange.degraded_from or None),
        (route.id_header, exchange.request if route.id_header else None),
    ]
    return [(name, str(value).encode("utf-8", "replace")) for name, value in told if value is not None]


async def _send_error(send: Send, error: ApiError, route: PostRoute, extra: Headers | None = None) -> None:
    headers = [_JSON, *(extra or [])]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await _send(send, error.status, route.error_body(error), headers)


async def _send(send: Send, status: int, body: bytes, headers: Headers) -> None:
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
