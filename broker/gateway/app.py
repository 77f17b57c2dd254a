"""The HTTP face of the gateway: OpenAI's routes as raw ASGI, everything else in starlette (ING-1).

The hot routes are plain ASGI functions, because a framework's request and response objects cost more than all our own
work. A client that leaves is known of in the moment its connection ends: while tokens are counted, while the request is
queued, while its model wakes, and during the answer, streamed or not (PAINS A1 to A3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.api import tokenizing
from broker.api.openai_answers import error_body, whole_answer
from broker.api.openapi import document
from broker.core.requests.admission import ModelView
from broker.gateway.exchange import Ask, Ended, Exchange, Failed
from broker.gateway.keys import ANYONE, ApiKeys, Caller
from broker.gateway.metrics import CONTENT_TYPE
from broker.gateway.other_apis import OTHER_APIS, OtherApi, Translation, translated
from broker.gateway.sse_stream import SseStream
from broker.http.cycle import CYCLE, HttpCycle
from subjects.errors import ApiError, place_of
from subjects.messages import Endpoint

if TYPE_CHECKING:
    from broker.gateway.gateway import Gateway

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

HOT_ROUTES = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/embeddings": Endpoint.EMBEDDINGS,
}
ANSWERED_HERE: dict[str, Callable[[tokenizing.Tokenized, bytes], Awaitable[bytes]]] = {
    "/tokenize": tokenizing.tokenize,
    "/detokenize": tokenizing.detokenize,
    "/v1/tokenize": tokenizing.tokenize,
    "/v1/detokenize": tokenizing.detokenize,
}
"""Routes that take a body and need no model to run."""
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


@dataclass(frozen=True, slots=True)
class HttpOptions:
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
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        path: str = scope["path"]
        headers = _headers(scope)
        other = OTHER_APIS.get(path)
        caller = ANYONE
        if self._keys is not None and path not in OPEN_ROUTES:
            # Before routing: without a key, no path tells whether it exists (PAINS O1).
            try:
                caller = self._keys.caller(headers.get("authorization", "") if other is None else other.key(headers))
            except ApiError as error:
                await _send_error(send, error, other=other)
                return
        endpoint = HOT_ROUTES.get(path) if other is None else other.endpoint
        here = ANSWERED_HERE.get(path) if other is None else other.answer_here
        if endpoint is None and here is None:
            await self._rest(scope, receive, send)
        elif scope["method"] != "POST":
            await _send_error(send, _method_not_allowed(), [(b"allow", b"POST")], other)
        else:
            watch = _Watch(scope[CYCLE])
            try:
                if endpoint is not None:
                    await self._completion(endpoint, caller, headers, watch, send, other)
                elif here is not None:
                    await self._answer_here(here, headers, watch, send, other)
            finally:
                self._forget_body(watch)
                watch.stop()

    async def _completion(
        self, endpoint: Endpoint, caller: Caller, headers: dict[str, str], watch: _Watch, send: Send, other: OtherApi | None
    ) -> None:
        translation: Translation | None = None
        try:
            _check_content_type(headers)
            body = await self._read_body(headers, watch)
            if other is not None and other.translate is not None:
                translation = other.translate(body)
                body = translation.chat
        except ApiError as error:
            await _send_error(send, error, other=other)
            return
        except _ClientGone:
            return
        ask = Ask(endpoint=endpoint, body=body, tenant=caller.tenant, sla_class=caller.sla_class, headers=headers)
        try:
            exchange = await self._gateway.open(ask)
        except ApiError as error:
            await _send_error(send, error, other=other)
            return
        except Exception as error:
            log.error("a request could not be opened", error=place_of(error))
            await _send_error(send, _internal_error(), other=other)
            return
        watch.follow(exchange)
        try:
            if other is not None and translation is not None:
                await self._translated(exchange, other, translation, send)
            elif exchange.stream:
                await self._stream(exchange, watch.cycle, send)
            else:
                await _whole(exchange, send)
        finally:
            exchange.leave()

    async def _answer_here(
        self,
        answer: Callable[[tokenizing.Tokenized, bytes], Awaitable[bytes]],
        headers: dict[str, str],
        watch: _Watch,
        send: Send,
        other: OtherApi | None,
    ) -> None:
        try:
            _check_content_type(headers)
            body = await answer(self._gateway.tokenized, await self._read_body(headers, watch))
        except ApiError as error:
            await _send_error(send, error, other=other)
        except _ClientGone:
            pass
        except Exception as error:
            log.error("a request could not be answered", error=place_of(error))
            await _send_error(send, _internal_error(), other=other)
        else:
            await _send(send, 200, body, [_JSON])

    async def _read_body(self, headers: dict[str, str], watch: _Watch) -> bytes:
        limit = self._options.body_bytes_max
        whole = watch.cycle.body_now()
        if whole is not None and len(whole) <= limit:
            self._hold_body(watch, len(whole))
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
                    message = await watch.cycle.receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
                        self._hold_body(watch, len(part))
                    else:
                        parts.clear()
                        self._forget_body(watch)
                        if size > DISCARDED_BYTES_MAX:
                            raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(408, "The request body did not arrive in time.", code="request_timeout") from None
        if size > limit:
            raise too_large
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _hold_body(self, watch: _Watch, size_bytes: int) -> None:
        watch.body_bytes += size_bytes
        self._bodies_bytes += size_bytes
        if self._bodies_bytes > self._options.bodies_bytes_max:
            message = "This gateway holds as many bytes of requests as it takes."
            raise ApiError(503, message, type="server_error", code="overloaded", retry_after_s=1)

    def _forget_body(self, watch: _Watch) -> None:
        self._bodies_bytes -= watch.body_bytes
        watch.body_bytes = 0

    async def _stream(self, exchange: Exchange, cycle: HttpCycle, send: Send) -> None:
        """Server-sent events. Headers go out with the first output or after ``sse_open_after_s``, whichever comes first."""
        await exchange.wait(self._options.sse_open_after_s)
        if exchange.left:
            return
        end = exchange.end_if_read()
        if isinstance(end, Failed):
            await _send_error(send, end.error, _about(exchange))
            return
        await send({"type": "http.response.start", "status": 200, "headers": _SSE + _about(exchange)})
        await SseStream(exchange, cycle, self._options.keep_alive_s).run()

    async def _translated(self, exchange: Exchange, other: OtherApi, translation: Translation, send: Send) -> None:
        """The answer in another API's words; the same rules as for a chat."""
        opened = False
        options = self._options
        try:
            async for data, more in translated(exchange, translation, options.sse_open_after_s, options.keep_alive_s):
                if not exchange.stream:
                    await _send(send, 200, data, [_JSON, *_about(exchange, other)])
                    return
                if not opened:
                    opened = True
                    headers = _SSE + _about(exchange, other)
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except ApiError as error:
            await _send_error(send, error, _about(exchange, other), other)


async def _whole(exchange: Exchange, send: Send) -> None:
    deltas: list[Any] = []
    while True:
        piece = await exchange.next()
        if piece is None:
            return
        if isinstance(piece, Failed):
            await _send_error(send, piece.error, _about(exchange))
            return
        if isinstance(piece, Ended):
            break
        deltas.extend(piece)
    answer = whole_answer(exchange.head)
    answer.add(deltas)
    body = answer.body(piece.usage)
    await _send(send, 200, body, [_JSON, *_about(exchange)])


class _Watch:
    """What one request holds, and its client's disconnect."""

    def __init__(self, cycle: HttpCycle) -> None:
        self.cycle = cycle
        self.body_bytes = 0
        """Of the request's body, as far as it is held."""

    def follow(self, exchange: Exchange) -> None:
        """Leaves the exchange when the client goes, at once if it has gone already."""
        self.cycle.on_gone = exchange.leave
        if self.cycle.gone:
            exchange.leave()

    def stop(self) -> None:
        """The exchange over HTTP has ended."""
        self.cycle.on_gone = None


# ---------------------------------------------------------------------------------------------------------- other routes


def _rest_of_the_routes(gateway: Gateway, all_metrics: Callable[[], Awaitable[bytes]] | None) -> Starlette:
    """What is here has its line in :mod:`broker.api.openapi` too; a test compares the two."""

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_model(view, state) for view, state in gateway.model_states()]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        found = gateway.state_of(name)
        if found is None:
            raise gateway.unknown_model(name)
        return _json(_model(*found))

    def _model(view: ModelView, state: str) -> dict[str, Any]:
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

    async def health(request: Request) -> Response:
        return _json({"status": "alive", "bus": "connected" if gateway.bus_connected else "lost"})

    async def ready(request: Request) -> Response:
        reason = gateway.unready_reason()
        return _json({"status": reason or "ready"}, 503 if reason else 200)

    async def metrics(request: Request) -> Response:
        text = gateway.metrics_text() if all_metrics is None else await all_metrics()
        return Response(text, media_type=CONTENT_TYPE)

    async def pool(request: Request) -> Response:
        return Response(msgspec.json.encode(gateway.digest), media_type="application/json")

    async def openapi(request: Request) -> Response:
        return Response(document(), media_type="application/json")

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s is not None else None
        return Response(error_body(error), error.status, headers, media_type="application/json")

    async def not_found(request: Request, error: Exception) -> Response:
        return await api_error(
            request, ApiError(404, "Unknown request URL. See /openapi.json for what is served.", code="unknown_url")
        )

    async def wrong_method(request: Request, error: Exception) -> Response:
        response = await api_error(request, _method_not_allowed())
        response.headers["allow"] = "GET"
        return response

    async def our_fault(request: Request, error: Exception) -> Response:
        return await api_error(request, _internal_error())

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/pool", pool),
            Route("/openapi.json", openapi),
        ],
        exception_handlers={ApiError: api_error, 404: not_found, 405: wrong_method, Exception: our_fault},
    )


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


def _internal_error() -> ApiError:
    return ApiError(500, "The gateway failed on this request.", type="server_error", code="internal_error")


def _about(exchange: Exchange, other: OtherApi | None = None) -> Headers:
    """The headers that say who answered. All values are our own ids, numbers and configured names."""
    headers = [
        (b"x-request-id", exchange.request.encode()),  # where OpenAI's SDKs look for it
        (b"x-carpool-request-id", exchange.request.encode()),
        (b"x-carpool-model", exchange.model.encode("utf-8", "replace")),
    ]
    if exchange.replica is not None:
        headers.append((b"x-carpool-replica", exchange.replica.encode()))
        headers.append((b"x-carpool-attempt", str(exchange.attempt).encode()))
    if exchange.queue_wait_s is not None:
        headers.append((b"x-carpool-queue-wait-ms", str(round(exchange.queue_wait_s * 1000)).encode()))
    if exchange.prefix_tokens:
        headers.append((b"x-carpool-prefix-tokens", str(exchange.prefix_tokens).encode()))
    if exchange.degraded_from:
        headers.append((b"x-carpool-degraded-from", exchange.degraded_from.encode("utf-8", "replace")))
    if other is not None and other.id_header:
        headers.append((other.id_header, exchange.request.encode()))
    return headers


async def _send_error(send: Send, error: ApiError, extra: Headers | None = None, other: OtherApi | None = None) -> None:
    headers = [_JSON, *(extra or [])]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    body = error_body(error) if other is None else other.error_body(error)
    await _send(send, error.status, body, headers)


async def _send(send: Send, status: int, body: bytes, headers: Headers) -> None:
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
