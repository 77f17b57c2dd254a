"""Request Profiles (ING-3, ING-4) and learned output lengths (PRO-5)."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from profiles.blocks import chain_hashes, tenant_salt
from profiles.capacity import lane_of, pages_for
from subjects import messages as m
from subjects.errors import ApiError
from subjects.ids import ModelHash, Tenant

COMPLETION_TOKENS_DEFAULT = 16
"""What OpenAI's completions route generates when the body names no ``max_tokens``."""
TASK_PRIORITY: Mapping[m.RequestKind, int] = {
    m.RequestKind.INFERENCE: 10,
    m.RequestKind.BATCH: 5,
    m.RequestKind.HEALTH_CHECK: 10,
    m.RequestKind.FINE_TUNE_VALIDATION: 1,
    m.RequestKind.LOAD_TEST: 1,
}
"""Given for inference and fine-tune validation (ING-4); a probe must see what inference sees, a load test must yield."""
EXPECTED_QUANTILE = 0.75
"""The share of finished requests that an expected length covers: pages held in vain cost less than a preemption."""
SAMPLES_MIN = 8
"""Fewer finished requests than this say nothing."""
SAMPLES_KEPT = 128
"""The last lengths of one key; older ones are forgotten, so that the estimate follows a change of traffic."""
KEYS_MAX = 4096
"""Keys (model, tenant, kind) remembered at once: some 10 MB; the one used longest ago goes first."""

_PROMPT_FIELD = {m.Endpoint.CHAT: "messages", m.Endpoint.COMPLETIONS: "prompt", m.Endpoint.EMBEDDINGS: "input"}


class BodyFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a checked OpenAI body that decide something here (ING-3); ``broker.api.openai_bodies`` fills them."""

    model: str
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    adapter: str = ""
    structured: bool = False
    tools: bool = False
    priority: int = 0
    history_turns: int = 0
    continuable: bool = False
    """As far as the body alone decides; the engine has its say in :func:`profile_and_chain`."""


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a request brings beside its body. ``sla_class`` None means: the model's class; ``adapter`` answers for it."""

    tenant: Tenant
    trust_domain: str = ""
    """Whose requests may reuse each other's KV (SEC-1); empty: those of the tenant alone."""
    deadline_unix_s: float
    sla_class: m.SlaClass | None = None
    business_id: str = ""
    chain_id: str = ""
    environment: str = "production"
    kind: m.RequestKind = m.RequestKind.INFERENCE
    adapter: m.Adapter | None = None


class PromptChain(msgspec.Struct, frozen=True):
    """What a prompt's KV is known by. It stays in the gateway: the profile has only its end."""

    salt: bytes
    """Of the trust domain and the adapter; the engine must get this very one."""
    hashes: list[bytes] = []
    """Of the full blocks of a single prompt (:func:`profiles.blocks.chain_hashes`); several prompts have none."""


# ------------------------------------------------------------------------------------------------------------- profile


def prompt_entropy(token_ids: Sequence[int]) -> float:
    """Shannon entropy in bits of the distribution of token ids; 0 for an empty prompt."""
    total = len(token_ids)
    if total == 0:
        return 0.0
    weighted = sum(count * math.log2(count) for count in Counter(token_ids).values() if count > 1)
    return max(0.0, math.log2(total) - weighted / total)


def profile_and_chain(
    record: m.ModelRecord,
    endpoint: m.Endpoint,
    fields: BodyFields,
    prompts: Sequence[Sequence[int]],
    context: RequestContext,
    lengths: OutputLengths,
) -> tuple[m.RequestProfile, PromptChain]:
    """The profile of one request; ``prompts`` are the token ids of ``Tokenizers.get(record).prompts(endpoint, body)``.

    Counts are over all prompts of the body. The prefix chain is that of a single prompt; several have none.

    Raises:
        ApiError: 400 ``context_length_exceeded``, a prompt leaves no room for one output token.
    """
    longest = max((len(prompt) for prompt in prompts), default=0)
    room = record.max_context_len - longest
    if room < min(1, fields.max_tokens if fields.max_tokens is not None else 1):
        raise ApiError(
            400,
            f"This model's maximum context length is {record.max_context_len} tokens, and the prompt has {longest} tokens. "
            "Please shorten the prompt.",
            param=_PROMPT_FIELD[endpoint],
            code="context_length_exceeded",
        )
    if fields.max_tokens is not None:
        max_tokens = min(fields.max_tokens, room)
    else:
        max_tokens = room if endpoint is m.Endpoint.CHAT else min(COMPLETION_TOKENS_DEFAULT, room)
    learned = lengths.expected(record.model_hash, context.tenant, context.kind)
    expected = min(max_tokens, record.max_output_tokens_default if learned is None else learned)
    input_tokens = sum(len(prompt) for prompt in prompts)
    pages = sum(_pages(len(prompt), expected, fields.n, record.block_size) for prompt in prompts)
    if endpoint is m.Endpoint.EMBEDDINGS:
        pages = pages_for(longest, record.block_size)  # one input after another, and nothing is kept of those before
    salt = tenant_salt(
        context.trust_domain or context.tenant, context.adapter.adapter_hash if context.adapter is not None else ""
    )
    hashes = chain_hashes(prompts[0], record.block_size, salt) if len(prompts) == 1 else []
    profile = m.RequestProfile(
        model_hash=record.model_hash,
        deployment=record.deployment,
        endpoint=endpoint,
        tenant=context.tenant,
        sla_class=context.sla_class or record.sla_class,
        lane=lane_of(pages),
        kind=context.kind,
        max_tokens=max_tokens,
        stream=fields.stream,
        temperature=fields.temperature,
        top_p=fields.top_p,
        n=fields.n * (max(1, len(prompts)) if endpoint is m.Endpoint.COMPLETIONS else 1),
        stop_count=len(fields.stop),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        adapter=context.adapter.name if context.adapter is not None else fields.adapter,
        structured=fields.structured,
        tools=fields.tools,
        priority=fields.priority,
        input_tokens=input_tokens,
        prompt_entropy=prompt_entropy(prompts[0] if len(prompts) == 1 else [item for prompt in prompts for item in prompt]),
        expected_output_tokens=expected,
        token_ratio=expected / input_tokens if input_tokens else float(expected),
        history_turns=fields.history_turns,
        prefix_head=hashes[-1] if hashes else b"",
        prefix_blocks=len(hashes),
        kv_pages_needed=pages,
        preferred_engine=_preferred_engine(record, fields),
        business_id=context.business_id,
        chain_id=context.chain_id,
        environment=context.environment,
        task_priority=TASK_PRIORITY[context.kind],
        deadline_unix_s=context.deadline_unix_s,
        continuable=fields.continuable and record.engine_type is not m.EngineType.OPENAI_HTTP,
    )
    return profile, PromptChain(salt, hashes)


def _pages(prompt_tokens: int, output_tokens: int, n: int, block_size: int) -> int:
    """Choices share the prompt's full blocks; each has the rest, and its own output, for itself."""
    shared = prompt_tokens // block_size
    own = pages_for(prompt_tokens - shared * block_size + output_tokens, block_size)
    return shared + n * own


def _preferred_engine(record: m.ModelRecord, fields: BodyFields) -> m.EngineType | None:
    """Tools, formats and adapters are exact only in an engine with vLLM's OpenAI layer or in a server that has its own."""
    if record.engine_type is m.EngineType.SIMULATED:
        return m.EngineType.SIMULATED
    return record.engine_type if fields.structured or fields.tools or fields.adapter else None


# ------------------------------------------------------------------------------------------------------------- lengths


Number = TypeVar("Number", int, float)


class Ring(Generic[Number]):
    """The last values in order of arrival, and the same ones sorted: an exact quantile is one look."""

    __slots__ = ("_latest", "_ordered")

    def __init__(self, kept: int) -> None:
        self._latest: deque[Number] = deque(maxlen=kept)
        self._ordered: list[Number] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: Number) -> None:
        """One more; the oldest goes when it is full."""
        if len(self._latest) == self._latest.maxlen:
            del self._ordered[bisect_left(self._ordered, self._latest[0])]
        self._latest.append(value)
        insort(self._ordered, value)

    def quantile(self, share: float) -> Number:
        """The smallest value that at least ``share`` of the values do not exceed; there must be one."""
        return self._ordered[max(0, math.ceil(share * len(self._ordered)) - 1)]


class OutputLengths:
    """Output lengths seen lately, by model, tenant and kind; bounded memory, old values are forgotten.

    The exact quantile of the last ``SAMPLES_KEPT`` values of a key, which is simpler than a sketch and follows a change at
    once. While a tenant has too few, all tenants of the model and kind stand in. One thread.
    """

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        if keys_max < 1:
            raise ValueError("keys_max must be at least 1")
        self._keys_max = keys_max
        self._rings: OrderedDict[tuple[ModelHash, Tenant | None, str], Ring[int]] = OrderedDict()
        # Kinds by their names: an enum member is slow to hash, and each request is looked up four times.

    def observe(self, model_hash: ModelHash, tenant: Tenant, kind: m.RequestKind, output_tokens: int) -> None:
        """A request finished by itself or by its limit after ``output_tokens``; not one that was cancelled or failed."""
        for key in ((model_hash, tenant, kind._value_), (model_hash, None, kind._value_)):
            self._rings.setdefault(key, Ring(SAMPLES_KEPT)).add(max(0, output_tokens))
            self._rings.move_to_end(key)
            if len(self._rings) > self._keys_max:
                self._rings.popitem(last=False)

    def expected(self, model_hash: ModelHash, tenant: Tenant, kind: m.RequestKind) -> int | None:
        """The expected length, at least 1, or None while too little was seen."""
        for key in ((model_hash, tenant, kind._value_), (model_hash, None, kind._value_)):
            ring = self._rings.get(key)
            if ring is not None and len(ring) >= SAMPLES_MIN:
                return max(1, ring.quantile(EXPECTED_QUANTILE))
        return None

    def forget(self, model_hash: ModelHash) -> None:
        """Drops what is known of a model that is gone."""
        for key in [key for key in self._rings if key[0] == model_hash]:
            del self._rings[key]
