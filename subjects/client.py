"""The SDK: one class to ask the pool, over HTTP or over NATS, with or without asyncio (ING-7).

::

    with CrossModelScheduler("http://127.0.0.1:8080") as scheduler:
        print(scheduler.infer("Name one colour.", max_tokens=12).text)
        for chunk in scheduler.infer("Count to ten.", stream=True, model="smollm2"):
            print(chunk.text, end="")

    async with AsyncCrossModelScheduler("nats://127.0.0.1:4222", tenant="acme") as scheduler:
        result = await scheduler.infer("Name one colour.")
        async for chunk in await scheduler.infer("Count to ten.", stream=True):
            print(chunk.text, end="")

Without ``model`` the pool picks one (``"auto"``); ``result.model`` says which. Every failure is an
:class:`~subjects.errors.ApiError` with the HTTP status and OpenAI's error fields, whichever way the request went.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar, overload
from urllib.parse import urlsplit

import msgspec

from subjects import names
from subjects.codec import decode, encode
from subjects.errors import ApiError, BusError, DecodeError, NoResponders
from subjects.ids import is_token
from subjects.messages import ControlReply, ControlRequest, Endpoint, InferFrame, InferRequest, Usage

if TYPE_CHECKING:
    import httpx

    from subjects.nats.bus import NatsBus

CONNECT_TIMEOUT_S: Final = 10.0
DISCOVERY_TIMEOUT_S: Final = 2.0
NATS_SILENCE_S_MAX: Final = 30.0
"""A gateway sends an empty frame every 5 s while a request waits, so after this much silence it is gone."""

T = TypeVar("T")
Body = dict[str, Any]


class Result(msgspec.Struct, frozen=True):
    """A whole answer. ``model`` is the one that answered, ``raw`` the OpenAI response."""

    text: str
    model: str
    finish_reason: str | None
    usage: Usage | None
    raw: Mapping[str, Any]


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a streamed answer; ``usage`` comes with the last one. ``raw`` is the OpenAI chunk."""

    text: str
    model: str
    finish_reason: str | None
    usage: Usage | None
    raw: Mapping[str, Any]


class _Way(Protocol):
    """How requests reach the pool: answers come as the JSON of OpenAI responses and chunks."""

    async def whole(self, body: Body) -> Body:
        """One request, one response."""

    def stream(self, body: Body) -> AsyncGenerator[Body, None]:
        """One request, its chunks."""

    async def devices(self) -> tuple[Mapping[str, Any], ...]:
        """The pool's devices, as far as this way can tell."""

    async def close(self) -> None:
        """Ends connections."""


class AsyncCrossModelScheduler:
    """Asks the pool behind ``endpoint``: ``http://HOST:PORT`` (or https) or ``nats://HOST:PORT`` (or tls).

    ``tenant`` is who asks over NATS; over HTTP ``api_key`` says it. ``timeout_s`` bounds the silence of the other side, not
    the length of an answer. With ``auto_discover_gpus`` the first request over NATS also reads the pool's devices into
    :attr:`devices`; it never fails a request. HTTP does not offer that.
    """

    def __init__(
        self,
        endpoint: str,
        auto_discover_gpus: bool = True,
        *,
        tenant: str = "default",
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        scheme = urlsplit(endpoint).scheme
        if not is_token(tenant):
            raise ValueError(f"tenant {tenant!r}: use letters, digits, '-' and '_'")
        self._way: _Way
        if scheme in ("http", "https"):
            self._way = _Http(endpoint, api_key=api_key, timeout_s=timeout_s)
        elif scheme in ("nats", "tls"):
            self._way = _Nats(endpoint, tenant=tenant, api_key=api_key, timeout_s=timeout_s)
        else:
            raise ValueError(f"endpoint {endpoint!r}: use http://HOST:PORT or nats://HOST:PORT")
        self._discover = auto_discover_gpus
        self._devices: tuple[Mapping[str, Any], ...] = ()

    @property
    def devices(self) -> tuple[Mapping[str, Any], ...]:
        """The pool's devices as of the first request or the last :meth:`discover`; empty when unknown."""
        return self._devices

    async def discover(self) -> tuple[Mapping[str, Any], ...]:
        """Reads the pool's devices again; empty over HTTP or while no scheduler answers."""
        self._discover = False
        self._devices = await self._way.devices()
        return self._devices

    @overload
    async def infer(
        self,
        prompt: str | None = None,
        max_tokens: int | None = None,
        stream: Literal[False] = False,
        *,
        model: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> Result: ...

    @overload
    async def infer(
        self,
        prompt: str | None = None,
        max_tokens: int | None = None,
        *,
        stream: Literal[True],
        model: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Chunk, None]: ...

    async def infer(
        self,
        prompt: str | None = None,
        max_tokens: int | None = None,
        stream: bool = False,
        *,
        model: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> Result | AsyncGenerator[Chunk, None]:
        """Asks with a ``prompt`` or with chat ``messages``; ``fields`` are any others of OpenAI's chat completions.

        Returns a :class:`Result`, or with ``stream`` an iterator of :class:`Chunk`. Closing the iterator early ends the
        request over HTTP at once.

        Raises:
            ApiError: refused, failed, or not reachable; while streaming also from the iterator.
            ValueError: neither or both of ``prompt`` and ``messages``.
        """
        body = _body(prompt, max_tokens, stream, model, messages, fields)
        if self._discover:
            await self.discover()
        if stream:
            return _chunks(self._way.stream(body))
        return _result(await self._way.whole(body))

    async def close(self) -> None:
        """Ends connections; calling again does nothing."""
        await self._way.close()

    async def __aenter__(self) -> AsyncCrossModelScheduler:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class CrossModelScheduler:
    """The same without asyncio; it may be used from several threads. See :class:`AsyncCrossModelScheduler`."""

    def __init__(
        self,
        endpoint: str,
        auto_discover_gpus: bool = True,
        *,
        tenant: str = "default",
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._inner = AsyncCrossModelScheduler(
            endpoint, auto_discover_gpus, tenant=tenant, api_key=api_key, timeout_s=timeout_s
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @property
    def devices(self) -> tuple[Mapping[str, Any], ...]:
        """See :attr:`AsyncCrossModelScheduler.devices`."""
        return self._inner.devices

    def discover(self) -> tuple[Mapping[str, Any], ...]:
        """See :meth:`AsyncCrossModelScheduler.discover`."""
        return self._run(self._inner.discover())

    @overload
    def infer(
        self,
        prompt: str | None = None,
        max_tokens: int | None = None,
        stream: Literal[False] = False,
        *,
        model: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> Result: ...

    @overload
    def infer(
        self,
        prompt: str | None = None,
        max_tokens: int | None = None,
        *,
        stream: Literal[True],
        model: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> Iterator[Chunk]: ...

    def infer(
        self,
        prompt: str | None = None,
        max_tokens: int | None = None,
        stream: bool = False,
        *,
        model: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> Result | Iterator[Chunk]:
        """See :meth:`AsyncCrossModelScheduler.infer`."""
        if stream:
            chunks = self._run(self._inner.infer(prompt, max_tokens, stream=True, model=model, messages=messages, **fields))
            return self._iterate(chunks)
        result: Result = self._run(self._inner.infer(prompt, max_tokens, model=model, messages=messages, **fields))
        return result

    def _iterate(self, chunks: AsyncGenerator[Chunk, None]) -> Iterator[Chunk]:
        try:
            while True:
                chunk = self._run(_next(chunks))
                if chunk is None:
                    return
                yield chunk
        finally:
            if self._loop is not None:
                self._run(chunks.aclose())

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="carpool-sdk", daemon=True)
                self._thread.start()
            loop = self._loop
        future = asyncio.run_coroutine_threadsafe(call, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # a KeyboardInterrupt here must end the request there
            raise

    def close(self) -> None:
        """Ends connections and the thread; calling again does nothing."""
        if self._loop is None or self._thread is None:
            return
        self._run(self._inner.close())
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def __enter__(self) -> CrossModelScheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)


# ---------------------------------------------------------------------------------------------- OpenAI's JSON, both ways


def _body(
    prompt: str | None,
    max_tokens: int | None,
    stream: bool,
    model: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    fields: Mapping[str, Any],
) -> Body:
    if (prompt is None) == (messages is None):
        raise ValueError("infer takes either a prompt or messages")
    turns = list(messages) if messages is not None else [{"role": "user", "content": prompt}]
    body: Body = {"model": model or "auto", "messages": turns, **fields}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if stream:
        body["stream"] = True
        body.setdefault("stream_options", {"include_usage": True})
    return body


def _usage(raw: Mapping[str, Any]) -> Usage | None:
    usage = raw.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
    )


def _first_choice(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = raw.get("choices")
    return choices[0] if isinstance(choices, list) and choices else {}


def _result(raw: Body) -> Result:
    choice = _first_choice(raw)
    text = (choice.get("message") or {}).get("content") or ""
    return Result(text, str(raw.get("model", "")), choice.get("finish_reason"), _usage(raw), raw)


async def _chunks(raws: AsyncGenerator[Body, None]) -> AsyncGenerator[Chunk, None]:
    async with aclosing(raws):
        async for raw in raws:
            choice = _first_choice(raw)
            text = (choice.get("delta") or {}).get("content") or ""
            yield Chunk(text, str(raw.get("model", "")), choice.get("finish_reason"), _usage(raw), raw)


def _parsed(payload: bytes | str) -> Body:
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise _broken("the answer is not a JSON object") from None


def _broken(text: str) -> ApiError:
    return ApiError(502, text, type="server_error", code="broken_answer")


def _unreachable(text: str) -> ApiError:
    return ApiError(503, text, type="server_error", code="unreachable", retry_after_s=1)


def _error(status: int, payload: bytes, *, retry_after: str | None = None) -> ApiError:
    """The error that a response with this status and body stands for, whoever wrote it."""
    try:
        raw = msgspec.json.decode(payload)
    except msgspec.MsgspecError:
        raw = None
    error = raw.get("error") if isinstance(raw, dict) else None
    fields = error if isinstance(error, dict) else {}
    return ApiError(
        status,
        str(fields.get("message") or f"the server answered {status}"),
        type=str(fields.get("type") or "server_error"),
        param=fields.get("param"),
        code=None if fields.get("code") is None else str(fields["code"]),
        retry_after_s=int(retry_after) if retry_after is not None and retry_after.isdigit() else None,
    )


def _checked(raw: Body) -> Body:
    """A chunk, unless it is an error in the middle of a stream."""
    if isinstance(raw.get("error"), dict):
        raise _error(500, msgspec.json.encode(raw))
    return raw


# -------------------------------------------------------------------------------------------------------------------- HTTP


class _Http:
    """OpenAI's HTTP form."""

    def __init__(self, endpoint: str, *, api_key: str | None, timeout_s: float) -> None:
        self._url = endpoint.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self._client: httpx.AsyncClient | None = None

    def _connected(self) -> httpx.AsyncClient:
        import httpx

        if self._client is None:
            timeout = httpx.Timeout(self._timeout_s, connect=min(self._timeout_s, CONNECT_TIMEOUT_S))
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=timeout, limits=limits)
        return self._client

    @asynccontextmanager
    async def _answer(self, body: Body) -> AsyncIterator[httpx.Response]:
        import httpx

        try:
            headers = {"Content-Type": "application/json"}
            content = msgspec.json.encode(body)
            async with self._connected().stream("POST", self._url, content=content, headers=headers) as response:
                if response.status_code >= 400:
                    payload = await response.aread()
                    raise _error(response.status_code, payload, retry_after=response.headers.get("Retry-After"))
                yield response
        except httpx.TimeoutException as error:
            raise ApiError(504, f"no answer from {self._url} in time", type="server_error", code="timeout") from error
        except httpx.TransportError as error:
            raise _unreachable(f"{self._url}: {error or type(error).__name__}") from error

    async def whole(self, body: Body) -> Body:
        async with self._answer(body) as response:
            return _checked(_parsed(await response.aread()))

    async def stream(self, body: Body) -> AsyncGenerator[Body, None]:
        async with self._answer(body) as response:
            lines: list[str] = []
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    lines.append(line[5:].removeprefix(" "))
                elif not line and lines:
                    data = "\n".join(lines)
                    lines.clear()
                    if data == "[DONE]":
                        return
                    yield _checked(_parsed(data))
        raise _broken("the stream ended before it was done")

    async def devices(self) -> tuple[Mapping[str, Any], ...]:
        return ()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


# -------------------------------------------------------------------------------------------------------------------- NATS


class _Nats:
    """One request on the tenant's subject; numbered frames come back below the tenant's own inbox prefix."""

    def __init__(self, endpoint: str, *, tenant: str, api_key: str | None, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._tenant = tenant
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self._bus: NatsBus | None = None
        self._connecting = asyncio.Lock()

    async def _connected(self) -> NatsBus:
        from subjects.nats.bus import NatsBus

        async with self._connecting:
            if self._bus is None:
                try:
                    self._bus = await NatsBus.connect(
                        self._endpoint,
                        name=f"carpool-sdk-{self._tenant}",
                        inbox_prefix=f"_INBOX_{self._tenant}",
                        timeout_s=min(self._timeout_s, CONNECT_TIMEOUT_S),
                    )
                except BusError as error:
                    raise _unreachable(str(error)) from error
            return self._bus

    async def whole(self, body: Body) -> Body:
        async with aclosing(self._frames(body, stream=False)) as frames:
            async for payload in frames:
                return _checked(_parsed(payload))
        raise _broken("the answer was empty")

    async def stream(self, body: Body) -> AsyncGenerator[Body, None]:
        async with aclosing(self._frames(body, stream=True)) as frames:
            async for payload in frames:
                yield _checked(_parsed(payload))

    async def _frames(self, body: Body, *, stream: bool) -> AsyncGenerator[bytes, None]:
        """Bodies of the answer's frames, in order and without a gap."""
        request = InferRequest(endpoint=Endpoint.CHAT, body=msgspec.json.encode(body), headers=self._headers, stream=stream)
        arrived: asyncio.Queue[bytes | BusError] = asyncio.Queue()
        bus = await self._connected()
        try:
            replies = await bus.request_many(
                names.infer(self._tenant), encode(request), on_reply=arrived.put_nowait, on_error=arrived.put_nowait
            )
        except BusError as error:
            raise _unreachable(str(error)) from error
        try:
            expected = 0
            while True:
                frame = await self._next_frame(arrived)
                if frame.sequence < expected:
                    continue
                if frame.sequence > expected:
                    raise _broken(f"part {expected} of the answer was lost on the way")
                expected += 1
                if frame.status >= 400:
                    raise _error(frame.status, frame.body)
                if frame.body:
                    yield frame.body
                if frame.last:
                    return
        finally:
            await replies.stop()

    async def _next_frame(self, arrived: asyncio.Queue[bytes | BusError]) -> InferFrame:
        silence_s = min(self._timeout_s, NATS_SILENCE_S_MAX)
        try:
            async with asyncio.timeout(silence_s):
                payload = await arrived.get()
        except TimeoutError as error:
            text = f"nothing was heard from the gateway for {silence_s:g} s"
            raise ApiError(504, text, type="server_error", code="timeout") from error
        if isinstance(payload, NoResponders):
            raise _unreachable("no gateway listens on this NATS server for this tenant")
        if isinstance(payload, BusError):
            raise _unreachable(str(payload))
        try:
            return decode(payload, InferFrame)
        except DecodeError as error:
            raise _broken("a part of the answer is not an InferFrame") from error

    async def devices(self) -> tuple[Mapping[str, Any], ...]:
        request = encode(ControlRequest(argument=b'{"what":"devices"}'))
        try:
            bus = await self._connected()
            reply = decode(await bus.request(names.control("get"), request, timeout_s=DISCOVERY_TIMEOUT_S), ControlReply)
            return tuple(msgspec.json.decode(reply.result, type=list[dict[str, Any]]))
        except (BusError, DecodeError, msgspec.MsgspecError):
            return ()  # no scheduler answers just now, or tenants may not ask it

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()
            self._bus = None
