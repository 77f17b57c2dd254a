"""A simulated engine as a pure core: continuous batching whose step times come from a capacity profile.

Events are what an engine is told, commands are what comes out of it. Time is the caller's clock, real or virtual.

A step takes ``step_const_s + step_request_s * batch + step_context_token_s * context`` for the requests that decode, plus
``prefill_token_s * L + prefill_token2_s * L**2`` for the prompt tokens that are prefilled in it (in chunks, as vLLM does).
Requests wait while no slot or no page is free; one that grows when no page is free preempts the youngest, which is computed
again later.

Every token is a hash of its request and its index (:func:`expected_token`), so that a gap, a repeat or a foreign token in an
answer is one comparison away.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, hypot
from typing import Literal, assert_never

import msgspec

from profiles.costs import sums_of, work_s
from profiles.estimate import SIMULATED
from subjects import messages as m
from subjects.ids import RequestId
from workers.core.embeddings import EncodingFormat, embedding_deltas, write_vector

CHOICES_MAX = 128
MESSAGE_OVERHEAD_TOKENS = 4
"""Tokens that a chat template adds around one message."""
BYTES_PER_TOKEN = 4
"""How the simulated engine counts the tokens of a text: UTF-8 bytes over this, rounded up."""
TOKEN_BITS = 31
STEP_SMOOTHING = 0.1
"""Weight of the newest step in the running mean of step times."""
EMBEDDING_DIMENSIONS = 256
"""Numbers of a simulated vector, unless the body asks for fewer."""
DEFAULT_OUTPUT_TOKENS = 16
"""What a body that names no ``max_tokens`` asks for, as in OpenAI's completions."""


_64_BITS = (1 << 64) - 1


def expected_token(request: RequestId, index: int, choice: int = 0) -> int:
    """Token ``index`` of the answer to ``request``: the same in every attempt and on every replica."""
    mixed = (_seed(request, choice) + index * 0x9E3779B97F4A7C15 & _64_BITS) * 0xBF58476D1CE4E5B9 & _64_BITS
    return mixed >> (64 - TOKEN_BITS)


@lru_cache(maxsize=4096)
def _seed(request: RequestId, choice: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{request}/{choice}".encode(), digest_size=8).digest(), "big")


def token_text(token: int) -> str:
    """The text of one simulated token."""
    return f" {token:08x}"


def expected_text(request: RequestId, index: int, choice: int = 0) -> str:
    """The text of token ``index`` of the answer to ``request``."""
    return token_text(expected_token(request, index, choice))


def expected_answer(request: RequestId, tokens: int, choice: int = 0) -> str:
    """The text of the first ``tokens`` tokens of the answer to ``request``."""
    return "".join(expected_text(request, index, choice) for index in range(tokens))


def expected_embedding(text: str | Sequence[int], dimensions: int = EMBEDDING_DIMENSIONS) -> list[float]:
    """The vector of one input, a text or its token ids: of length 1, the same for the same input, and for fewer dimensions
    the first ones of it, made to length 1 again."""
    seed = text if isinstance(text, str) else repr(tuple(text))
    numbers: list[int] = []
    while len(numbers) < dimensions:
        digest = hashlib.blake2b(f"{len(numbers)}/{seed}".encode(errors="surrogatepass"), digest_size=64).digest()
        numbers += struct.unpack("<32h", digest)
    length = hypot(*numbers[:dimensions])
    return [number / length for number in numbers[:dimensions]]


# ------------------------------------------------------------------------------------------------------------- profile


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedProfile:
    """What the engine can do, how long it takes, and which faults it shows.

    The default times are those of a 7B model on an A100. ``engine_options`` of a model record use these very names
    (``slots``, ``kv_pages``, ``block_size`` and ``max_context_len`` come from the record unless they are given).
    """

    slots: int = 8
    kv_pages: int = 1024
    block_size: int = 32
    max_context_len: int = 8192
    mode: Literal["hash", "instant"] = "hash"
    """``hash`` takes the profile's time; ``instant`` takes none. Tokens are hashes in both."""
    prefill_token_s: float = SIMULATED.prefill_token_s
    prefill_token2_s: float = SIMULATED.prefill_token2_s
    step_const_s: float = SIMULATED.step_const_s
    step_request_s: float = SIMULATED.step_request_s
    step_context_token_s: float = SIMULATED.step_context_token_s
    time_scale: float = 1.0
    """Multiplies all step times."""
    chunk_tokens: int = 2048
    """Prompt tokens that one step prefills at most."""
    tokens_per_step: int = 1
    """Tokens that one step adds to a choice (above 1 as with speculative decoding)."""
    preempts: bool = True
    """Whether pages are taken as a request grows; else all of them are reserved before it starts."""

    load_s: float = 0.0
    """Time that the start takes."""
    wake_s: float = 0.0
    """Time that waking takes."""
    resizes_kv: bool = True
    sleeps: bool = True
    """Whether it offers another KV budget while it runs, and sleep."""
    load_fails: bool = False
    die_after_tokens: int = 0
    """The engine dies after this many tokens of all requests; 0: never."""
    freeze_after_tokens: int = 0
    """The engine stops to answer after this many tokens; 0: never."""
    fail_rate: float = 0.0
    """Share of requests, chosen by hash, that fail as sick."""
    ignores_aborts: bool = False

    def __post_init__(self) -> None:
        positive = ("slots", "kv_pages", "block_size", "max_context_len", "chunk_tokens", "tokens_per_step")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("prefill_token_s", "prefill_token2_s", "step_const_s", "step_request_s", "step_context_token_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if min(self.time_scale, self.load_s, self.wake_s, self.die_after_tokens, self.freeze_after_tokens) < 0:
            raise ValueError("time_scale, load_s, wake_s, die_after_tokens and freeze_after_tokens must not be negative")
        if not 0 <= self.fail_rate <= 1:
            raise ValueError("fail_rate must be from 0 to 1")
        if self.mode not in ("hash", "instant"):
            raise ValueError(f"mode {self.mode!r}: use 'hash' or 'instant'")

    @property
    def costs(self) -> m.StepCosts:
        """What steps take."""
        scale = self.time_scale
        return m.StepCosts(**{part: scale * getattr(self, part) for part in m.StepCosts.__struct_fields__})


_OPTION_KINDS: dict[str, type] = {
    "slots": int,
    "kv_pages": int,
    "block_size": int,
    "max_context_len": int,
    "mode": str,
    "prefill_token_s": float,
    "prefill_token2_s": float,
    "step_const_s": float,
    "step_request_s": float,
    "step_context_token_s": float,
    "time_scale": float,
    "chunk_tokens": int,
    "tokens_per_step": int,
    "preempts": bool,
    "load_s": float,
    "wake_s": float,
    "resizes_kv": bool,
    "sleeps": bool,
    "load_fails": bool,
    "die_after_tokens": int,
    "freeze_after_tokens": int,
    "fail_rate": float,
    "ignores_aborts": bool,
}


def profile_from_options(
    options: Mapping[str, str | int | float | bool], *, slots: int, kv_pages: int, block_size: int, max_context_len: int
) -> SimulatedProfile:
    """A profile from a record's ``engine_options``; the keyword arguments stand where the options say nothing.

    Raises:
        ValueError: an unknown option, or one of a wrong type or value; the message names it.
    """
    values: dict[str, str | int | float | bool] = {
        "slots": slots,
        "kv_pages": kv_pages,
        "block_size": block_size,
        "max_context_len": max_context_len,
    }
    for name in sorted(options):
        value = options[name]
        kind = _OPTION_KINDS.get(name)
        if kind is None:
            raise ValueError(f"engine option {name!r} is unknown to the simulated engine; known: {', '.join(_OPTION_KINDS)}")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"engine option {name!r} must be of type {kind.__name__}")
        values[name] = value
    return SimulatedProfile(**values)  # type: ignore[arg-type]  # each value was checked against _OPTION_KINDS above


# ------------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """A request as the simulated engine understands it.

    ``tokens`` is the length of the whole answer, ``sent_tokens`` of which the client already has. ``first_token_s`` and
    ``token_s`` are lower bounds on the times before the first and each further token. One with ``vectors`` asks for
    embeddings: these are its answer, all at once after the prefill, and only the longest input takes pages.
    """

    request: RequestId
    attempt: int
    input_tokens: int
    tokens: int
    max_tokens: int
    choices: int = 1
    sent_tokens: int = 0
    first_token_s: float = 0.0
    token_s: float = 0.0
    fail: m.FailureKind | None = None
    fail_after_tokens: int = 0
    vectors: tuple[bytes, ...] = ()
    longest_input_tokens: int = 0


class _Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body's extra field ``carpool_sim``, honoured only by this engine."""

    tokens: int | None = None
    fail: m.FailureKind | None = None
    fail_after_tokens: int = 0
    first_token_s: float = 0.0
    token_s: float = 0.0


class _Part(msgspec.Struct, frozen=True):
    text: str | None = None


class _Message(msgspec.Struct, frozen=True):
    content: str | list[_Part] | None = None


class _Body(msgspec.Struct, frozen=True):
    messages: list[_Message] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    input: str | list[str | int | list[int]] | None = None
    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    carpool_sim: _Script | None = None


_body_decoder = msgspec.json.Decoder(_Body)


def parse_request(
    *,
    request: RequestId,
    attempt: int,
    endpoint: m.Endpoint,
    body: bytes,
    sent_token_ids: tuple[int, ...] = (),
    max_tokens: int = 0,
) -> SimulatedRequest | m.Failure:
    """What an OpenAI body asks of the simulated engine, or why it is refused (the text never quotes the body).

    ``max_tokens`` above zero bounds the whole answer; else the body's own field does. The answer is that long, unless the
    body's ``carpool_sim.tokens`` is smaller.
    """
    try:
        parsed = _body_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _bad_request("the body is not a JSON object of the expected shape")
    script = parsed.carpool_sim or _Script()
    if endpoint is m.Endpoint.EMBEDDINGS:
        return _parse_embeddings(request, attempt, parsed, script)
    counted = _count_prompt(endpoint, parsed)
    if counted is None:
        return _bad_request("the body holds no messages" if endpoint is m.Endpoint.CHAT else "the body holds no prompt")
    input_tokens, prompts = counted
    named = parsed.max_tokens if parsed.max_completion_tokens is None else parsed.max_completion_tokens
    asked = max_tokens or (DEFAULT_OUTPUT_TOKENS if named is None else named)
    choices = prompts * (1 if parsed.n is None else parsed.n)
    if asked < 1 or not 1 <= choices <= CHOICES_MAX:
        return _bad_request(f"max_tokens must be at least 1 and n from 1 to {CHOICES_MAX}")
    if sent_token_ids and choices > 1:
        return _bad_request("several choices cannot be continued")
    if any(token != expected_token(request, index) for index, token in enumerate(sent_token_ids)):
        return m.Failure(kind=m.FailureKind.SICK, message="the tokens already sent are not those of this request")
    return SimulatedRequest(
        request=request,
        attempt=attempt,
        input_tokens=input_tokens,
        tokens=asked if script.tokens is None else max(0, min(asked, script.tokens)),
        max_tokens=asked,
        choices=choices,
        sent_tokens=len(sent_token_ids),
        first_token_s=max(0.0, script.first_token_s),
        token_s=max(0.0, script.token_s),
        fail=script.fail,
        fail_after_tokens=script.fail_after_tokens,
    )


def _parse_embeddings(request: RequestId, attempt: int, body: _Body, script: _Script) -> SimulatedRequest | m.Failure:
    dimensions = EMBEDDING_DIMENSIONS if body.dimensions is None else body.dimensions
    if not 1 <= dimensions <= EMBEDDING_DIMENSIONS:
        return _bad_request(f"dimensions must be from 1 to {EMBEDDING_DIMENSIONS} for this model")
    given = body.input or []
    inputs: list[str | list[int]] = [given] if isinstance(given, str) else []
    ids: list[int] = []
    for item in given if isinstance(given, list) else ():
        ids.append(item) if isinstance(item, int) else inputs.append(item)
    if ids:
        inputs.append(ids)
    if not inputs:
        return _bad_request("the body holds no input")
    counts = [max(1, _item_tokens(item)) for item in inputs]
    encoding = body.encoding_format or "float"
    return SimulatedRequest(
        request=request,
        attempt=attempt,
        input_tokens=sum(counts),
        tokens=1,
        max_tokens=1,
        first_token_s=max(0.0, script.first_token_s),
        fail=script.fail,
        vectors=tuple(write_vector(expected_embedding(item, dimensions), encoding) for item in inputs),
        longest_input_tokens=max(counts),
    )


def _bad_request(message: str) -> m.Failure:
    return m.Failure(kind=m.FailureKind.BAD_REQUEST, message=message, status=400)


def _text_tokens(text: str) -> int:
    return ceil(len(text.encode(errors="surrogatepass")) / BYTES_PER_TOKEN)


def _count_prompt(endpoint: m.Endpoint, body: _Body) -> tuple[int, int] | None:
    """Input tokens and how many prompts there are, or None when there is none."""
    match endpoint:
        case m.Endpoint.CHAT:
            if not body.messages:
                return None
            return sum(MESSAGE_OVERHEAD_TOKENS + _content_tokens(message.content) for message in body.messages), 1
        case m.Endpoint.COMPLETIONS:
            if body.prompt is None or body.prompt == []:
                return None
            if isinstance(body.prompt, str):
                return max(1, _text_tokens(body.prompt)), 1
            if all(isinstance(item, int) for item in body.prompt):
                return len(body.prompt), 1
            return max(1, sum(_item_tokens(item) for item in body.prompt)), len(body.prompt)
        case m.Endpoint.EMBEDDINGS:
            return None
        case _:
            assert_never(endpoint)


def _content_tokens(content: str | list[_Part] | None) -> int:
    if content is None:
        return 0
    if isinstance(content, str):
        return _text_tokens(content)
    return sum(_text_tokens(part.text) for part in content if part.text)


def _item_tokens(item: str | int | list[int]) -> int:
    match item:
        case str():
            return _text_tokens(item)
        case int():
            return 1
        case _:
            return len(item)


# ----------------------------------------------------------------------------------------------------- events, commands


class RequestAdded(msgspec.Struct, frozen=True):
    """The engine was given a request."""

    request: SimulatedRequest


class RequestAborted(msgspec.Struct, frozen=True):
    """The engine was told to stop a request; unknown ones are ignored."""

    request: RequestId
    attempt: int


class Ticked(msgspec.Struct, frozen=True):
    """Time went by."""


class KvResized(msgspec.Struct, frozen=True):
    """The engine has so many KV pages from now on; see :meth:`SimulatedCore.cannot_resize`."""

    kv_pages: int


SimulatedEvent = RequestAdded | RequestAborted | KvResized | Ticked


class EmitDeltas(msgspec.Struct, frozen=True):
    """What one engine step brought."""

    deltas: tuple[m.Delta, ...]


class Die(msgspec.Struct, frozen=True):
    """The engine is dead; nothing comes out of it any more."""

    detail: str


SimulatedCommand = EmitDeltas | Die


# ----------------------------------------------------------------------------------------------------------------- core


@dataclass(slots=True, eq=False)
class _Sequence:
    asked: SimulatedRequest
    not_before_s: float
    """When its next token may come at the earliest."""
    next_index: int
    """Tokens that each choice has, those sent before included."""
    prefill_left: int = 0
    """Tokens whose KV is still to be computed before it can decode."""
    pages: int = 0
    running: bool = False

    @property
    def context(self) -> int:
        """Tokens that must be in the KV cache before the next one can be made, shared ones counted once."""
        return self.asked.input_tokens + self.asked.choices * self.next_index


@dataclass(slots=True, frozen=True)
class _Step:
    end_s: float
    duration_s: float
    prefills: tuple[tuple[_Sequence, int], ...]
    """Sequences and the tokens of them that this step prefills."""
    decodes: tuple[_Sequence, ...]
    does: m.StepSums


class SimulatedCore:
    """The whole engine. One engine step ends per :meth:`step` call at most, so that a caller can go on between two."""

    def __init__(self, profile: SimulatedProfile) -> None:
        self.profile = profile
        self._costs = profile.costs
        self.kv_pages = profile.kv_pages
        """All pages, free or not."""
        self._sequences: dict[tuple[RequestId, int], _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._pages_used = 0
        self._step: _Step | None = None
        self._retry_s: float | None = None
        self._dead = False
        self._frozen = False
        self.tokens_made = 0
        self.aborted = 0
        """Requests that an abort reached while they waited or ran."""
        self.preempted = 0
        self.busy_s = 0.0
        """Time in which steps ran."""
        self.step_s = 0.0
        """Running mean of a step's time."""
        self.sums = m.StepSums()
        """Of all steps."""

    # ---- reads

    @property
    def next_wake_s(self) -> float | None:
        """When the core wants a :class:`Ticked`; None when only an event can change anything. May be in the past."""
        if self._dead or self._frozen:
            return None
        return self._retry_s if self._step is None else self._step.end_s

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def kv_pages_free(self) -> int:
        """Pages that nobody holds."""
        return self.kv_pages - self._pages_used

    def cannot_resize(self, kv_pages: int) -> str:
        """Why the engine cannot have so many pages from now on; empty when it can."""
        if kv_pages < 1:
            return "that is less than one page"
        if kv_pages < self._pages_used:
            return f"{self._pages_used} pages are in use, only {kv_pages} would be left"
        most = max((self._pages(self._most_tokens(s.asked)) for s in self._sequences.values()), default=0)
        return f"a request here may need {most} pages, only {kv_pages} would be left" if most > kv_pages else ""

    # ---- the one entry

    def step(self, now_s: float, event: SimulatedEvent) -> list[SimulatedCommand]:
        """Applies ``event`` at ``now_s`` and returns what came out of the engine."""
        if self._dead or self._frozen:
            return []
        commands: list[SimulatedCommand] = []
        if self._step is not None and self._step.end_s <= now_s:
            ended, self._step = self._step, None
            commands += self._end_step(ended)
            # Back to back: an engine does not wait for its caller between two steps.
            self._begin_step(ended.end_s)
        match event:
            case RequestAdded(request):
                commands += self._add(now_s, request)
            case RequestAborted(request, attempt):
                self._abort(request, attempt)
            case KvResized(kv_pages):
                self.kv_pages = kv_pages
            case Ticked():
                pass
            case _:
                assert_never(event)
        if self._step is None:
            self._begin_step(now_s)
        return commands

    # ---- events

    def _add(self, now_s: float, asked: SimulatedRequest) -> list[SimulatedCommand]:
        key = (asked.request, asked.attempt)
        if key in self._sequences:
            return []
        longest = asked.longest_input_tokens if asked.vectors else asked.input_tokens + asked.tokens
        if longest > self.profile.max_context_len or self._pages(self._most_tokens(asked)) > self.kv_pages:
            message = (
                f"{asked.input_tokens} input tokens and {asked.tokens} output tokens do not fit "
                f"the context of {self.profile.max_context_len} tokens and {self.kv_pages} KV pages"
            )
            return [EmitDeltas((self._failed(asked, asked.sent_tokens, _bad_request(message)),))]
        sequence = _Sequence(asked=asked, not_before_s=now_s + asked.first_token_s, next_index=asked.sent_tokens)
        if asked.tokens <= asked.sent_tokens and asked.fail is None:
            return [EmitDeltas(tuple(self._closing(sequence, choice) for choice in range(asked.choices)))]
        self._sequences[key] = sequence
        self._waiting.append(sequence)
        return []

    def _abort(self, request: RequestId, attempt: int) -> None:
        sequence = self._sequences.get((request, attempt))
        if sequence is None:
            return
        self.aborted += 1
        if not self.profile.ignores_aborts:
            self._forget(sequence)

    def _forget(self, sequence: _Sequence) -> None:
        del self._sequences[(sequence.asked.request, sequence.asked.attempt)]
        if sequence.running:
            self._release(sequence)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)

    # ---- steps

    def _begin_step(self, start_s: float) -> None:
        self._admit()
        self._retry_s = None
        decodes: list[_Sequence] = []
        prefills: list[tuple[_Sequence, int]] = []
        chunk_left = self.profile.chunk_tokens
        for sequence in list(self._running):
            if not sequence.running:
                continue  # preempted for an older one in this very loop
            if sequence.prefill_left > 0:
                tokens = min(sequence.prefill_left, chunk_left)
                chunk_left -= tokens
                if tokens > 0:
                    prefills.append((sequence, tokens))
            elif sequence.not_before_s > start_s:
                if self._retry_s is None or sequence.not_before_s < self._retry_s:
                    self._retry_s = sequence.not_before_s
            elif self._grow(sequence):
                decodes.append(sequence)
        # Preemption takes the youngest, so it can take one that was not picked yet, never one that was.
        if decodes or prefills:
            does = self._does(decodes, prefills)
            duration_s = 0.0 if self.profile.mode == "instant" else work_s(self._costs, does)
            self._step = _Step(start_s + duration_s, duration_s, tuple(prefills), tuple(decodes), does)

    def _admit(self) -> None:
        """First come, first served: the head waits for its slot and pages, and nobody overtakes it."""
        while self._waiting and len(self._running) < self.profile.slots:
            sequence = self._waiting[0]
            pages = self._pages(self._tokens_wanted(sequence))
            if pages > self.kv_pages_free:
                return
            self._waiting.popleft()
            self._running.append(sequence)
            self._pages_used += pages
            sequence.pages = pages
            sequence.running = True
            sequence.prefill_left = sequence.context

    def _grow(self, sequence: _Sequence) -> bool:
        """Takes the pages of the next tokens; False when ``sequence`` itself had to give way."""
        missing = max(0, self._pages(self._tokens_wanted(sequence)) - sequence.pages)
        while missing > self.kv_pages_free:
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._pages_used += missing
        sequence.pages += missing
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        self.preempted += 1
        self._release(sequence)
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)

    def _release(self, sequence: _Sequence) -> None:
        self._pages_used -= sequence.pages
        sequence.pages = 0
        sequence.running = False

    @staticmethod
    def _does(decodes: list[_Sequence], prefills: list[tuple[_Sequence, int]]) -> m.StepSums:
        prompt_tokens = prompt_tokens2 = 0
        for sequence, tokens in prefills:
            done = sequence.context - sequence.prefill_left
            prompt_tokens += tokens
            prompt_tokens2 += (done + tokens) ** 2 - done**2
        return m.StepSums(
            steps=1,
            prompt_tokens=prompt_tokens,
            prompt_tokens2=prompt_tokens2,
            requests=sum(sequence.asked.choices for sequence in decodes),
            context_tokens=sum(sequence.context for sequence in decodes),
        )

    def _end_step(self, ended: _Step) -> list[SimulatedCommand]:
        self.busy_s += ended.duration_s
        self.sums = sums_of(self.sums, ended.does, ended.duration_s)
        self.step_s += (ended.duration_s - self.step_s) * (STEP_SMOOTHING if self.step_s else 1.0)
        ready: list[_Sequence] = []
        for sequence, tokens in ended.prefills:
            if sequence.running:
                sequence.prefill_left -= tokens
                if sequence.prefill_left == 0 and sequence.not_before_s <= ended.end_s:
                    ready.append(sequence)
        ready += [sequence for sequence in ended.decodes if sequence.running]
        deltas: list[m.Delta] = []
        for sequence in ready:
            deltas += self._advance(sequence, ended.end_s)
        commands: list[SimulatedCommand] = [EmitDeltas(tuple(deltas))] if deltas else []
        if 0 < self.profile.die_after_tokens <= self.tokens_made:
            self._dead = True
            commands.append(Die(f"the simulated engine died after {self.tokens_made} tokens, as its options ask"))
        elif 0 < self.profile.freeze_after_tokens <= self.tokens_made:
            self._frozen = True
        return commands

    def _advance(self, sequence: _Sequence, now_s: float) -> list[m.Delta]:
        """The next tokens of every choice of one sequence, or its failure."""
        asked = sequence.asked
        failure = self._failure_due(sequence)
        if failure is not None:
            self._forget(sequence)
            return [self._failed(asked, sequence.next_index, failure)]
        if asked.vectors:
            self._forget(sequence)
            self.tokens_made += 1
            usage = m.Usage(prompt_tokens=asked.input_tokens, completion_tokens=0)
            return embedding_deltas(asked.request, asked.attempt, asked.vectors, usage)
        first = sequence.next_index
        units = min(self.profile.tokens_per_step, asked.tokens - first)
        sequence.next_index += units
        sequence.not_before_s = now_s + asked.token_s
        self.tokens_made += units * asked.choices
        ends = sequence.next_index >= asked.tokens
        if ends:
            self._forget(sequence)
        deltas: list[m.Delta] = []
        for choice in range(asked.choices):
            tokens = tuple(expected_token(asked.request, index, choice) for index in range(first, first + units))
            last = ends and choice == asked.choices - 1
            deltas.append(
                m.Delta(
                    request=asked.request,
                    attempt=asked.attempt,
                    choice=choice,
                    first_token_index=first,
                    units=units,
                    text="".join(map(token_text, tokens)),
                    token_ids=tokens,
                    finish_reason=self._finish_reason(asked) if ends else None,
                    end=last,
                    usage=self._usage(asked) if last else None,
                )
            )
        return deltas

    def _failure_due(self, sequence: _Sequence) -> m.Failure | None:
        asked = sequence.asked
        if asked.fail is not None and sequence.next_index >= asked.fail_after_tokens:
            status = {m.FailureKind.BAD_REQUEST: 400, m.FailureKind.SICK: 500, m.FailureKind.BUSY: 503}[asked.fail]
            return m.Failure(kind=asked.fail, message="the request asked the simulated engine to fail", status=status)
        if not self.profile.fail_rate:
            return None
        # The index of the "choice" keeps this draw apart from the tokens themselves.
        draw = expected_token(asked.request, 0, choice=CHOICES_MAX) / (1 << TOKEN_BITS)
        if draw < self.profile.fail_rate:
            return m.Failure(kind=m.FailureKind.SICK, message="the simulated engine failed, as its options ask")
        return None

    def _closing(self, sequence: _Sequence, choice: int) -> m.Delta:
        """The end of a choice whose tokens the client already has."""
        asked = sequence.asked
        last = choice == asked.choices - 1
        return m.Delta(
            request=asked.request,
            attempt=asked.attempt,
            choice=choice,
            first_token_index=sequence.next_index,
            units=0,
            finish_reason=self._finish_reason(asked),
            end=last,
            usage=self._usage(asked) if last else None,
        )

    @staticmethod
    def _failed(asked: SimulatedRequest, index: int, failure: m.Failure) -> m.Delta:
        return failure_delta(asked.request, asked.attempt, failure, index=index)

    @staticmethod
    def _finish_reason(asked: SimulatedRequest) -> str:
        return "length" if asked.tokens >= asked.max_tokens else "stop"

    @staticmethod
    def _usage(asked: SimulatedRequest) -> m.Usage:
        """Of the whole answer: a continuation counts the tokens that an earlier attempt made."""
        return m.Usage(prompt_tokens=asked.input_tokens, completion_tokens=asked.tokens * asked.choices)

    # ---- pages

    def _most_tokens(self, asked: SimulatedRequest) -> int:
        if asked.vectors:
            return asked.longest_input_tokens
        return asked.input_tokens + asked.choices * asked.tokens

    def _tokens_wanted(self, sequence: _Sequence) -> int:
        most = self._most_tokens(sequence.asked)
        if not self.profile.preempts or sequence.asked.vectors:
            return most
        return min(most, sequence.context + sequence.asked.choices * self.profile.tokens_per_step)

    def _pages(self, tokens: int) -> int:
        return ceil(tokens / self.profile.block_size)


def failure_delta(request: RequestId, attempt: int, failure: m.Failure, *, index: int) -> m.Delta:
    """The one delta that ends a request with ``failure``; ``index`` is the next unit of its first choice."""
    return m.Delta(request=request, attempt=attempt, first_token_index=index, units=0, end=True, failure=failure)
