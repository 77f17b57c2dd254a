"""Request Profiles (ING-3, ING-4) and learned output lengths (PRO-5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from subjects.ids import ModelHash, Tenant
from subjects.messages import Endpoint, ModelRecord, RequestKind, RequestProfile, SlaClass


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyFields:
    """The parsed fields of an OpenAI body that decide something here (ING-3)."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """What a request brings beside its body. ``sla_class`` None means: the model's class."""

    tenant: Tenant
    deadline_unix_s: float
    sla_class: SlaClass | None = None
    business_id: str = ""
    chain_id: str = ""
    environment: str = "production"
    kind: RequestKind = RequestKind.INFERENCE


def parse_fields(endpoint: Endpoint, body: Mapping[str, Any]) -> BodyFields:
    """Reads and checks the fields; everything else in the body is the engine's business.

    Raises:
        ApiError: 400 with ``param``, for a field of the wrong type or range.
    """
    raise NotImplementedError


def build_profile(
    record: ModelRecord,
    endpoint: Endpoint,
    fields: BodyFields,
    prompts: Sequence[Sequence[int]],
    context: RequestContext,
    lengths: OutputLengths,
) -> RequestProfile:
    """The profile of one request; ``prompts`` are the token ids of ``Tokenizers.get(record).prompts(endpoint, body)``.

    Raises:
        ApiError: 400 ``context_length_exceeded``, the prompt leaves no room for one output token.
    """
    raise NotImplementedError


class OutputLengths:
    """Output lengths seen lately, by model, tenant and kind; bounded memory, old values are forgotten."""

    def observe(self, model_hash: ModelHash, tenant: Tenant, kind: RequestKind, output_tokens: int) -> None:
        """A request finished by itself (not by its limit) after ``output_tokens``."""

    def expected(self, model_hash: ModelHash, tenant: Tenant, kind: RequestKind) -> int | None:
        """The expected length, or None while too little was seen."""
        raise NotImplementedError
