"""Any OpenAI-compatible server as an engine: the body goes there as it is, its chunks come back as deltas.

Such a server shows no token ids, so a delta counts one unit per chunk and a stream cannot be continued elsewhere. What text
cannot carry (tool calls, reasoning, log probabilities) passes through unread. Closing the connection aborts a request.

Options of the record: ``model`` (the server's own model id, else the only one it lists or the record's name) and
``api_key_env`` (the environment variable that holds the server's key).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec

from subjects import messages as m
from subjects.errors import EngineError
from subjects.tasks import end_tasks
from workers.core.embeddings import EncodingFormat, embedding_deltas, rewritten
from workers.core.refusals import client_message
from workers.engines.base import EngineInfo, EngineLoad, EngineRequest, TaskEngine
from workers.engines.outbox import Outbox
from workers.spec import ReplicaSpec

START_TIMEOUT_S = 120.0
"""A server started beside us may still be loading."""
START_POLL_S = 0.5
CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 300.0
"""Longest time without a byte within a stream, its queue and prefill included."""
HEALTH_EVERY_S = 2.0
HEALTH_TIMEOUT_S = 5.0
HEALTH_FAILURES_MAX = 5
"""So many unanswered health checks in a row mean that the server is dead."""
LINE_BYTES_MAX = 8 * 1024 * 1024
ERROR_BYTES_MAX = 64 * 1024

EMBEDDINGS_BYTES_MAX = 128 * 1024 * 1024
"""Of one answer of a server with embeddings."""

_PATHS = {
    m.Endpoint.CHAT: "/chat/completions",
    m.Endpoint.COMPLETIONS: "/completions",
    m.Endpoint.EMBEDDINGS: "/embeddings",
}
_BUSY = (429, 503)
# The key and the model's name in the request are ours: the client can do nothing about these.
_NOT_THE_CLIENTS = (401, 403, 404, 407, 408)


class OpenAiHttpEngine(TaskEngine):
    """The ``openai_http`` engine."""

    def __init__(self, spec: ReplicaSpec) -> None:
        super().__init__()
        self._record = spec.record
        self._base = spec.record.source.rstrip("/").removesuffix("/v1")
        self._held_pages = 0
        self._http: httpx.AsyncClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._model = ""
        self._is_vllm = False
        self._health_path = "/health"
        self._kv_pages = 0

    async def start(self) -> EngineInfo:
        """Waits until the server answers, and finds its model."""
        record = self._record
        headers = {"accept-encoding": "identity"}
        key_variable = record.engine_options.get("api_key_env")
        if key_variable:
            key = os.environ.get(str(key_variable))
            if not key:
                raise EngineError(f"{record.name}: engine option api_key_env names {key_variable}, which is not set")
            headers["authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=record.max_num_seqs + 1),
            trust_env=False,
        )
        model = await self._find_model()
        self._model = str(model["id"])
        self._is_vllm = model.get("owned_by") == "vllm"
        served = model.get("max_model_len")
        context_len = min(record.max_context_len, served) if isinstance(served, int) else record.max_context_len
        # The server keeps its own KV; enough pages for all slots means that slots are the only bound.
        self._kv_pages = record.max_num_seqs * math.ceil(context_len / record.block_size)
        self._watch = asyncio.get_running_loop().create_task(self._watch_health())
        return EngineInfo(
            slots=record.max_num_seqs,
            kv_pages=self._kv_pages,
            block_size=record.block_size,
            max_context_len=context_len,
            gives_token_ids=False,
            continues=False,
        )

    async def warm(self, tokens: int) -> None:
        """One short completion, chat where the server has no completions; or one embedding."""
        if self._record.task is m.Task.EMBED:
            await self._warm_embedding()
            return
        bodies: list[tuple[m.Endpoint, dict[str, Any]]] = [
            (m.Endpoint.COMPLETIONS, {"prompt": "Hello"}),
            (m.Endpoint.CHAT, {"messages": [{"role": "user", "content": "Hello"}]}),
        ]
        reason = ""
        for endpoint, body in bodies:
            body |= {"model": self._model, "max_tokens": max(tokens, 1), "temperature": 0}
            try:
                reply = await self._client.post(self._url(endpoint), json=body)
                if reply.status_code == 200 and reply.json()["choices"]:
                    return
                reason = f"status {reply.status_code}"
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                reason = type(error).__name__
        raise EngineError(f"{self._record.name}: {self._base} did not answer the warm-up ({reason})")

    async def _warm_embedding(self) -> None:
        body = {"model": self._model, "input": "Hello", "encoding_format": "float"}
        try:
            reply = await self._client.post(self._url(m.Endpoint.EMBEDDINGS), json=body)
            reason = f"status {reply.status_code}"
            if reply.status_code == 200:
                vector = reply.json()["data"][0]["embedding"]
                if vector and all(math.isfinite(number) for number in vector):
                    return
                reason = "no vector of finite numbers"
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            reason = type(error).__name__
        raise EngineError(f"{self._record.name}: {self._base} did not answer the warm-up ({reason})")

    def load(self) -> EngineLoad:
        """What was sent and has not ended; the server's own queue is not visible."""
        free = max(self._kv_pages - self._held_pages, 0)
        return EngineLoad(running=len(self._running), waiting=0, kv_pages_free=free)

    async def stop(self) -> None:
        """Aborts what runs and closes all connections; the server itself is not ours to stop."""
        tasks = list(self._running.values())
        if self._watch is not None:
            tasks.append(self._watch)
        await end_tasks(tasks)
        if self._http is not None:
            await self._http.aclose()

    # ------------------------------------------------------------------------------------------------------- the server

    @property
    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            raise EngineError(f"{self._record.name}: the engine was not started")
        return self._http

    def _url(self, endpoint: m.Endpoint) -> str:
        return f"{self._base}/v1{_PATHS[endpoint]}"

    async def _find_model(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        reason = ""
        while time.monotonic() < deadline_s:
            try:
                reply = await self._client.get(f"{self._base}/v1/models", timeout=HEALTH_TIMEOUT_S)
                if reply.status_code == 200:
                    health = await self._client.get(f"{self._base}/health", timeout=HEALTH_TIMEOUT_S)
                    self._health_path = "/v1/models" if health.status_code in (404, 405) else "/health"
                    return self._choose_model(reply.json()["data"])
                reason = f"status {reply.status_code} on /v1/models"
                if reply.status_code in (401, 403):
                    break
            except (ValueError, LookupError, TypeError, AttributeError):
                raise EngineError(f"{self._record.name}: {self._base}/v1/models is not an OpenAI model list") from None
            except httpx.HTTPError as error:
                reason = type(error).__name__
            await asyncio.sleep(START_POLL_S)
        raise EngineError(f"{self._record.name}: no OpenAI server answers at {self._base} ({reason})")

    def _choose_model(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        wanted = self._record.engine_options.get("model")
        names = [str(model["id"]) for model in models]
        for name in (wanted,) if wanted else (self._record.name, names[0] if len(names) == 1 else None):
            if name in names:
                return models[names.index(str(name))]
        listed = ", ".join(names[:10])
        raise EngineError(f"{self._record.name}: set engine option model to one of what {self._base} serves: {listed}")

    async def _watch_health(self) -> None:
        failures = 0
        while failures < HEALTH_FAILURES_MAX:
            await asyncio.sleep(HEALTH_EVERY_S)
            try:
                reply = await self._client.get(self._base + self._health_path, timeout=HEALTH_TIMEOUT_S)
                failures = failures + 1 if reply.status_code >= 500 else 0
            except httpx.HTTPError:
                failures += 1
        self._outbox.die(EngineError(f"{self._record.name}: {self._base} failed {failures} health checks in a row"))

    # ------------------------------------------------------------------------------------------------------- one request

    async def _run(self, request: EngineRequest) -> None:
        self._held_pages += request.kv_pages_needed
        try:
            await self._ask(request)
        finally:
            self._held_pages -= request.kv_pages_needed

    async def _ask(self, request: EngineRequest) -> None:
        answer = _Answer(request, self._outbox)
        try:
            body = self._body(request)
        except (ValueError, TypeError, RecursionError):
            answer.fail(_bad("the body is not a JSON object"))
            return
        if request.sent_token_ids:
            answer.fail(_sick("an answer cannot be continued on a server that shows no token ids"))
            return
        try:
            async with self._client.stream(
                "POST", self._url(request.endpoint), content=body, headers={"content-type": "application/json"}
            ) as reply:
                if reply.status_code != 200:
                    failure = await _failure_of(reply)
                    if request.adapter is not None and reply.status_code == 404:
                        failure = _unknown_adapter(request.adapter)
                    answer.fail(failure)
                    return
                if request.endpoint is m.Endpoint.EMBEDDINGS:
                    answer.give_embeddings(*await _embeddings_of(reply, request.body))
                else:
                    await self._read(reply, answer)
        except httpx.TimeoutException:
            answer.fail(_sick("the server did not answer in time", 504))
        except httpx.HTTPError:
            answer.fail(_sick("the connection to the server failed", 502))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, msgspec.MsgspecError):
            answer.fail(_sick("the server sent something that is not an answer in OpenAI's form", 502))

    def _body(self, request: EngineRequest) -> bytes:
        body = json.loads(request.body)
        if not isinstance(body, dict):
            raise TypeError
        body["model"] = self._model
        if request.adapter is not None:
            body["model"] = request.adapter.source
            body.pop("adapter", None)  # how a client may name it here; a server may refuse what it does not know
        if request.endpoint is m.Endpoint.EMBEDDINGS:
            return json.dumps(body, ensure_ascii=False).encode()
        options = body.get("stream_options")
        body["stream"] = True
        body["stream_options"] = {**options, "include_usage": True} if isinstance(options, dict) else {"include_usage": True}
        if request.max_tokens > 0:
            given = [name for name in ("max_completion_tokens", "max_tokens") if isinstance(body.get(name), int)]
            for name in given or ["max_tokens"]:
                body[name] = min(body.get(name) or request.max_tokens, request.max_tokens)
        if request.cache_salt and self._is_vllm:
            body["cache_salt"] = request.cache_salt
        return json.dumps(body, ensure_ascii=False).encode()

    async def _read(self, reply: httpx.Response, answer: _Answer) -> None:
        async for line in _lines(reply):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                answer.finish()
                return
            chunk = json.loads(data)
            if chunk.get("error"):
                answer.fail(_failure_from(chunk["error"], 500))
                return
            answer.take(chunk)
        # Some servers close without [DONE]; that is an end only if every choice has said so.
        answer.finish()


class _Answer:
    """Turns the chunks of one request into deltas."""

    def __init__(self, request: EngineRequest, outbox: Outbox) -> None:
        self._request = request
        self._outbox = outbox
        self._next_index: dict[int, int] = {}
        self._finishing: list[m.Delta] = []
        self._usage: m.Usage | None = None
        self._ended = False

    def take(self, chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            self._usage = m.Usage(
                prompt_tokens=int(usage["prompt_tokens"]),
                completion_tokens=int(usage.get("completion_tokens") or 0),
                cached_tokens=int(details.get("cached_tokens") or 0),
            )
        deltas: list[m.Delta] = []
        for choice in chunk.get("choices") or ():
            delta = self._delta(choice)
            if delta is None:
                continue
            # Finishing ones wait for the usage, which comes after them and belongs on the very last.
            (self._finishing if delta.finish_reason else deltas).append(delta)
        if deltas:
            self._outbox.put(deltas)

    def give_embeddings(self, vectors: Sequence[bytes], usage: m.Usage | None) -> None:
        """The whole answer at once."""
        self._ended = True
        self._outbox.put(embedding_deltas(self._request.request, self._request.attempt, vectors, usage))

    def finish(self) -> None:
        """The stream is over; a choice that was begun and not finished was cut off."""
        if self._ended:
            return
        finished = {delta.choice for delta in self._finishing}
        if not finished or finished < self._next_index.keys():
            self.fail(_sick("the server ended the stream in the middle", 502))
            return
        self._ended = True
        *others, last = self._finishing
        self._outbox.put([*others, msgspec.structs.replace(last, end=True, usage=self._usage)])

    def fail(self, failure: m.Failure) -> None:
        if self._ended:
            return
        self._ended = True
        request = self._request
        self._outbox.put(
            [
                *self._finishing,
                m.Delta(
                    request=request.request,
                    attempt=request.attempt,
                    first_token_index=self._next_index.get(0, 0),
                    units=0,
                    end=True,
                    failure=failure,
                ),
            ]
        )

    def _delta(self, choice: dict[str, Any]) -> m.Delta | None:
        index = int(choice.get("index") or 0)
        if self._request.endpoint is m.Endpoint.CHAT:
            rest = {name: value for name, value in (choice.get("delta") or {}).items() if value not in (None, [], "")}
            text = rest.pop("content", "")
            rest.pop("role", None)
        else:
            rest = {}
            text = choice.get("text") or ""
        if choice.get("logprobs"):
            rest["logprobs"] = choice["logprobs"]
        finish_reason, stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
        # One field of another type would make the whole message of frames unreadable, other requests' deltas included.
        known = isinstance(finish_reason, str | None) and isinstance(stop_reason, str | int | None)
        if not (known and isinstance(text, str)):
            raise TypeError("a field of a choice has another type than OpenAI's")
        first_token_index = self._next_index.setdefault(index, 0)
        if not (text or rest or finish_reason):
            return None
        units = 1 if text or rest else 0
        self._next_index[index] += units
        return m.Delta(
            request=self._request.request,
            attempt=self._request.attempt,
            choice=index,
            first_token_index=first_token_index,
            units=units,
            text=text,
            detail=json.dumps(rest, ensure_ascii=False).encode() if rest else b"",
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )


class _Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: msgspec.Raw


class _EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int


class _Embeddings(msgspec.Struct, frozen=True):
    data: list[_Embedding]
    usage: _EmbeddingUsage | None = None


class _EmbeddingsAsked(msgspec.Struct, frozen=True):
    input: str | list[Any]
    encoding_format: EncodingFormat | None = None


async def _embeddings_of(reply: httpx.Response, body: bytes) -> tuple[list[bytes], m.Usage | None]:
    """The vectors in the order of the inputs, in the format that ``body`` asks for whatever the server knows of formats."""
    content = bytearray()
    async for piece in reply.aiter_bytes():
        content += piece
        if len(content) > EMBEDDINGS_BYTES_MAX:
            raise ValueError("the answer is too long")
    asked = msgspec.json.decode(body, type=_EmbeddingsAsked)
    answer = msgspec.json.decode(content, type=_Embeddings)
    one = isinstance(asked.input, str) or isinstance(asked.input[0], int)
    data = sorted(answer.data, key=lambda embedding: embedding.index)
    if [embedding.index for embedding in data] != list(range(1 if one else len(asked.input))):
        raise ValueError("the answer does not have one vector for each input")
    vectors = [rewritten(bytes(embedding.embedding), asked.encoding_format or "float") for embedding in data]
    counted = answer.usage
    return vectors, None if counted is None else m.Usage(prompt_tokens=counted.prompt_tokens, completion_tokens=0)


async def _lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    # Not aiter_lines(): it also splits at U+2028 and U+0085, which JSON may carry as they are.
    pending = bytearray()
    async for piece in reply.aiter_bytes():
        pending += piece
        if b"\n" not in piece:
            if len(pending) > LINE_BYTES_MAX:
                raise ValueError("a line of the stream is too long")
            continue
        *lines, rest = bytes(pending).split(b"\n")
        pending = bytearray(rest)
        for line in lines:
            yield line
    if pending:
        yield bytes(pending)


async def _failure_of(reply: httpx.Response) -> m.Failure:
    content = bytearray()
    with contextlib.suppress(httpx.HTTPError):
        async for piece in reply.aiter_bytes():
            content += piece
            if len(content) > ERROR_BYTES_MAX:
                break
    try:
        parsed = json.loads(content)
        error = parsed.get("error", parsed)
    except (ValueError, AttributeError):
        error = {}
    return _failure_from(error, reply.status_code)


def _failure_from(error: Any, status: int) -> m.Failure:
    fields = error if isinstance(error, dict) else {"message": str(error)}
    code = fields.get("code")
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    message = client_message(str(fields.get("message") or f"the server answered with status {status}"))
    if status in _BUSY:
        kind = m.FailureKind.BUSY
    elif 400 <= status < 500 and status not in _NOT_THE_CLIENTS:
        kind = m.FailureKind.BAD_REQUEST
    else:
        return _sick(message, status if status >= 500 else 502)
    param = fields.get("param")
    return m.Failure(
        kind=kind,
        message=message,
        status=status,
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )


def _unknown_adapter(adapter: m.Adapter) -> m.Failure:
    message = f"the server of this model does not serve the adapter '{adapter.name}'"
    return m.Failure(kind=m.FailureKind.BAD_REQUEST, message=message, status=400, param="model", code="adapter_unavailable")


def _sick(message: str, status: int = 500) -> m.Failure:
    return m.Failure(kind=m.FailureKind.SICK, message=message, status=status)


def _bad(message: str) -> m.Failure:
    return m.Failure(kind=m.FailureKind.BAD_REQUEST, message=message, status=400)
