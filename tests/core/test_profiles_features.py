"""Request features, block hashes and learned lengths (ING-3, ING-4, PRO-5)."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.api.openai_bodies import parse_body
from profiles.blocks import chain_hashes, tenant_salt
from profiles.features import (
    SAMPLES_KEPT,
    SAMPLES_MIN,
    BodyFields,
    OutputLengths,
    RequestContext,
    profile_and_chain,
    prompt_entropy,
)
from subjects.errors import ApiError
from subjects.ids import ModelHash, Tenant
from subjects.messages import Adapter, Endpoint, EngineType, Lane, ModelRecord, RequestKind, RequestProfile, SlaClass
from tests.core.profiled import build_profile

MODEL = ModelHash("ab" * 32)
TENANT = Tenant("t")
CONTEXT = RequestContext(tenant=TENANT, deadline_unix_s=100.0)


def record(**changes: Any) -> ModelRecord:
    """A model with pages of 32 tokens and a context of 4,096."""
    values: dict[str, Any] = {
        "name": "a",
        "model_hash": MODEL,
        "weights_hash": "w",
        "source": "/m",
        "weights_bytes": 1,
        "kv_bytes_per_token": 1,
        "kv_bytes": 1,
        "budget_bytes": 3,
        "max_context_len": 4096,
        "max_output_tokens_default": 100,
    }
    return ModelRecord(**values | changes)


def fields_of(endpoint: Endpoint, body: dict[str, Any]) -> BodyFields:
    """What the profile takes of a body that gives these fields beside the least that its route asks for."""
    least = {"messages": [{"role": "user", "content": "x"}]} if endpoint is Endpoint.CHAT else {"prompt": "x"}
    return parse_body(endpoint, msgspec.json.encode({"model": "a", **least, **body})).asked


def profile(body: dict[str, Any], tokens: int, endpoint: Endpoint = Endpoint.CHAT, **changes: Any) -> RequestProfile:
    """The profile of a body with one prompt of ``tokens`` tokens."""
    return build_profile(
        record(**changes), endpoint, fields_of(endpoint, body), [list(range(tokens))], CONTEXT, OutputLengths()
    )


# -------------------------------------------------------------------------------------------------------------- fields


def test_the_twelve_fields() -> None:
    """All fields of ING-3 are read from a body."""
    body = {
        "model": "a",
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": ["x", "y"],
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "adapter": "team/lora-1",
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function"}],
        "priority": 3,
        "messages": [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant", "user")],
    }
    assert fields_of(Endpoint.CHAT, body) == BodyFields(
        model="a",
        max_tokens=5,
        stream=True,
        include_usage=True,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop=("x", "y"),
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        adapter="team/lora-1",
        structured=True,
        tools=True,
        priority=3,
        history_turns=2,
        continuable=False,
    )


def test_nulls_are_defaults() -> None:
    """Clients send null for what they do not set."""
    names = (
        "max_tokens",
        "stream",
        "temperature",
        "top_p",
        "n",
        "stop",
        "presence_penalty",
        "tools",
        "response_format",
        "seed",
    )
    assert fields_of(Endpoint.CHAT, dict.fromkeys(names)) == BodyFields(model="a", continuable=True)


def test_max_completion_tokens_wins_in_chat() -> None:
    """The newer name of the bound counts, where both are given."""
    assert fields_of(Endpoint.CHAT, {"max_completion_tokens": 3, "max_tokens": 9}).max_tokens == 3
    assert fields_of(Endpoint.COMPLETIONS, {"max_completion_tokens": 3, "max_tokens": 9}).max_tokens == 9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("stream", "yes"),
        ("stop", 5),
        ("stop", [5]),
        ("priority", 1 << 40),
        ("repetition_penalty", -1),
    ],
)
def test_wrong_fields_are_400_with_their_name(field: str, value: Any) -> None:
    """A client learns which field is wrong."""
    with pytest.raises(ApiError) as caught:
        fields_of(Endpoint.CHAT, {field: value})
    assert (caught.value.status, (caught.value.param or "").partition("[")[0]) == (400, field)


@pytest.mark.parametrize(
    ("body", "continuable"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_p": 0.5, "max_tokens": 5}, True),
        ({"response_format": {"type": "text"}, "tools": [], "stop": [], "n": 1, "logprobs": False}, True),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, True),
        ({"response_format": {"type": "json_schema"}}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
        ({"n": 2}, False),
        ({"tools": [{"type": "function"}]}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"seed": 0}, False),
        ({"min_tokens": 3}, False),
        ({"stop": "x"}, False),
        ({"stop_token_ids": [5]}, False),
        ({"logit_bias": {"5": 1}}, False),
        ({"logprobs": True}, False),
    ],
)
def test_what_may_be_continued(body: dict[str, Any], continuable: bool) -> None:
    """A stream may be continued elsewhere only where nothing depends on what was generated before (DESIGN 3.7)."""
    assert profile(body, 10).continuable is continuable
    assert profile(body, 10, engine_type=EngineType.OPENAI_HTTP).continuable is False


def test_several_prompts_are_not_continued() -> None:
    """A list of prompts is many choices; a list of token ids is one prompt."""
    assert not fields_of(Endpoint.COMPLETIONS, {"prompt": ["a", "b"]}).continuable
    assert fields_of(Endpoint.COMPLETIONS, {"prompt": [1, 2]}).continuable
    assert fields_of(Endpoint.COMPLETIONS, {"prompt": ["a"]}).continuable


# ------------------------------------------------------------------------------------------------------------- profile


@pytest.mark.parametrize(
    ("ids", "bits"),
    [([], 0.0), ([5], 0.0), ([5] * 100, 0.0), ([1, 2], 1.0), (list(range(256)), 8.0), ([1, 1, 2, 3], 1.5)],
)
def test_entropy_golden(ids: list[int], bits: float) -> None:
    """Shannon entropy over token ids, in bits."""
    assert prompt_entropy(ids) == pytest.approx(bits)


@given(st.lists(st.integers(0, 20), max_size=200))
def test_entropy_bounds(ids: list[int]) -> None:
    """It is never negative, nor above the logarithm of the distinct ids, and order does not matter."""
    bits = prompt_entropy(ids)
    assert 0 <= bits <= math.log2(max(1, len(set(ids)))) + 1e-9
    assert prompt_entropy(sorted(ids)) == pytest.approx(bits)


def test_profile_numbers() -> None:
    """One golden profile: tokens, pages, lane, ratio, defaults of class, kind and priority."""
    result = profile({"max_tokens": 60, "stream": True}, 40)
    assert (result.model_hash, result.endpoint, result.tenant, result.stream) == (MODEL, Endpoint.CHAT, TENANT, True)
    assert (result.input_tokens, result.max_tokens, result.expected_output_tokens) == (40, 60, 60)
    assert result.kv_pages_needed == 4  # 40 + 60 tokens in pages of 32
    assert (result.lane, result.token_ratio) == (Lane.SMALL, 1.5)
    assert result.prompt_entropy == pytest.approx(math.log2(40))
    assert (result.sla_class, result.kind, result.task_priority) == (SlaClass.SILVER, RequestKind.INFERENCE, 10)
    assert (result.prefix_blocks, result.deadline_unix_s) == (1, 100.0)


@pytest.mark.parametrize(
    ("endpoint", "body", "max_tokens", "expected"),
    [
        (Endpoint.CHAT, {}, 4000, 100),
        (Endpoint.CHAT, {"max_tokens": 50}, 50, 50),
        (Endpoint.CHAT, {"max_tokens": 3000}, 3000, 100),
        (Endpoint.CHAT, {"max_tokens": 10**6}, 4000, 100),
        (Endpoint.COMPLETIONS, {}, 16, 16),
        (Endpoint.COMPLETIONS, {"max_tokens": 0}, 0, 0),
    ],
)
def test_output_bounds(endpoint: Endpoint, body: dict[str, Any], max_tokens: int, expected: int) -> None:
    """What a request may and will generate: its own bound, the context's room, the route's default, the model's."""
    result = profile(body, 96, endpoint)
    assert (result.max_tokens, result.expected_output_tokens) == (max_tokens, expected)


@pytest.mark.parametrize(
    ("tokens", "n", "pages"),
    [(0, 1, 4), (64, 1, 6), (65, 1, 6), (64, 3, 2 + 3 * 4), (65, 3, 2 + 3 * 4), (0, 2, 8)],
)
def test_choices_share_full_blocks_only(tokens: int, n: int, pages: int) -> None:
    """n choices share the prompt's full blocks; expected output is 100 tokens each."""
    assert profile({"n": n}, tokens).kv_pages_needed == pages


@pytest.mark.parametrize(("tokens", "lane"), [(1900, Lane.SMALL), (1960, Lane.MEDIUM)])
def test_lane_follows_pages(tokens: int, lane: Lane) -> None:
    """Prompt and expected output together decide the lane (64 pages of 32 tokens are small)."""
    assert profile({}, tokens).lane is lane


def test_prompts_that_do_not_fit() -> None:
    """A prompt without room for one token is refused with OpenAI's code; one with room for exactly one is taken."""
    assert profile({}, 4095).max_tokens == 1
    for tokens in (4096, 5000):
        with pytest.raises(ApiError) as caught:
            profile({}, tokens)
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", "messages")
    assert profile({"max_tokens": 0}, 4096, Endpoint.COMPLETIONS).max_tokens == 0


def test_several_prompts_are_summed() -> None:
    """Tokens and pages are those of all prompts; a prefix chain only a single prompt has."""
    fields = fields_of(Endpoint.COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 10})
    result = build_profile(
        record(), Endpoint.COMPLETIONS, fields, [list(range(40)), list(range(70))], CONTEXT, OutputLengths()
    )
    assert (result.input_tokens, result.kv_pages_needed, result.prefix_blocks, result.prefix_head) == (110, 2 + 3, 0, b"")


@pytest.mark.parametrize(
    ("kind", "priority"), [(RequestKind.INFERENCE, 10), (RequestKind.FINE_TUNE_VALIDATION, 1), (RequestKind.LOAD_TEST, 1)]
)
def test_context_of_a_request(kind: RequestKind, priority: int) -> None:
    """Headers arrive in the profile; the kind decides the task priority (ING-4)."""
    context = RequestContext(
        tenant=TENANT,
        deadline_unix_s=1.0,
        sla_class=SlaClass.GOLD,
        business_id="b",
        chain_id="c",
        environment="test",
        kind=kind,
    )
    result = build_profile(record(), Endpoint.CHAT, BodyFields(model="a"), [[1]], context, OutputLengths())
    assert (result.sla_class, result.business_id, result.chain_id, result.environment) == (SlaClass.GOLD, "b", "c", "test")
    assert result.task_priority == priority


# -------------------------------------------------------------------------------------------------------------- blocks


def test_block_hashes_golden() -> None:
    """The algorithm is fixed: the same tokens and tenant give the same hashes in every process and version."""
    assert [item.hex() for item in chain_hashes([1, 2, 3, 4, 5], 2, tenant_salt("t"))] == GOLDEN
    assert chain_hashes([1], 2) == []


GOLDEN = ["e7277d1ad9f3440bce09ae6edbe4efd6", "420f47c51dcf1a1db1226db52b68670b"]

tokens_and_cut = st.lists(st.integers(0, 2**32 - 1), max_size=60).flatmap(
    lambda tokens: st.tuples(st.just(tokens), st.integers(0, len(tokens)))
)


@given(tokens_and_cut, st.integers(1, 8))
def test_chains_share_exactly_the_common_blocks(case: tuple[list[int], int], block_size: int) -> None:
    """A prefix has the chain's first hashes; a change of one token changes its block and all later ones."""
    tokens, cut = case
    chain = chain_hashes(tokens, block_size)
    assert len(chain) == len(tokens) // block_size
    assert chain_hashes(tokens[:cut], block_size) == chain[: cut // block_size]
    assert len(set(chain)) == len(chain)
    if cut < len(tokens):
        changed = [*tokens[:cut], tokens[cut] ^ 1, *tokens[cut + 1 :]]
        other = chain_hashes(changed, block_size)
        same = cut // block_size
        assert other[:same] == chain[:same]
        assert not set(other[same:]) & set(chain[same:])


def test_a_chain_can_go_on_from_its_end() -> None:
    """Hashing in two parts is hashing in one."""
    tokens = list(range(100))
    first = chain_hashes(tokens[:64], 32, b"s")
    assert first + chain_hashes(tokens[64:], 32, b"s", parent=first[-1]) == chain_hashes(tokens, 32, b"s")


def test_tenants_never_share_a_hash() -> None:
    """The same prompt of two tenants has no block in common (PAINS: cross-tenant reuse leaks)."""
    tokens = list(range(64))
    one, other = (chain_hashes(tokens, 32, tenant_salt(tenant)) for tenant in ("a", "b"))
    assert not set(one) & set(other)


def test_only_a_trust_domain_shares_hashes() -> None:
    """Tenants of one domain have one salt and one chain, all others their own; the profile has the end of that chain, and
    the salt for the engine is the one it was hashed with, with several prompts too (O3)."""
    tokens = list(range(100))

    def chain(tenant: str, domain: str = "", adapter: str = "", prompts: int = 1) -> tuple[bytes, tuple[bytes, ...]]:
        context = RequestContext(
            tenant=Tenant(tenant),
            trust_domain=domain,
            adapter=Adapter(name="x", adapter_hash=adapter) if adapter else None,
            deadline_unix_s=1.0,
        )
        profile, chain = profile_and_chain(
            record(), Endpoint.COMPLETIONS, BodyFields(model="a"), [tokens] * prompts, context, OutputLengths()
        )
        hashes = chain_hashes(tokens, 32, chain.salt) if prompts == 1 else []
        assert chain.hashes == hashes
        assert (profile.prefix_head, profile.prefix_blocks) == ((hashes[-1], 3) if hashes else (b"", 0))
        return chain.salt, tuple(hashes)

    assert chain("a", "domain:d") == chain("b", "domain:d")
    alone = [chain("a"), chain("b"), chain("a", "domain:d"), chain("a", "domain:d", "ab"), chain("a", adapter="ab")]
    assert len(set(alone)) == 5
    assert chain("a", prompts=2) == (chain("a")[0], ())


# ------------------------------------------------------------------------------------------------------------- lengths


def test_lengths_need_samples() -> None:
    """Nothing is claimed from a handful of requests."""
    lengths = OutputLengths()
    for count in range(SAMPLES_MIN - 1):
        lengths.observe(MODEL, TENANT, RequestKind.INFERENCE, count)
    assert lengths.expected(MODEL, TENANT, RequestKind.INFERENCE) is None
    lengths.observe(MODEL, TENANT, RequestKind.INFERENCE, 7)
    assert lengths.expected(MODEL, TENANT, RequestKind.INFERENCE) == 5  # 0..7: three quarters are at most 5


def test_lengths_are_apart_by_tenant_and_kind() -> None:
    """A tenant's own history counts; a new tenant starts from all tenants of the model and kind (PRO-5)."""
    lengths = OutputLengths()
    other = Tenant("other")
    for _ in range(SAMPLES_MIN):
        lengths.observe(MODEL, TENANT, RequestKind.INFERENCE, 10)
    for _ in range(3 * SAMPLES_MIN):
        lengths.observe(MODEL, other, RequestKind.INFERENCE, 500)
    assert lengths.expected(MODEL, TENANT, RequestKind.INFERENCE) == 10
    assert lengths.expected(MODEL, other, RequestKind.INFERENCE) == 500
    assert lengths.expected(MODEL, Tenant("new"), RequestKind.INFERENCE) == 500
    assert lengths.expected(MODEL, TENANT, RequestKind.LOAD_TEST) is None
    assert lengths.expected(ModelHash("cd" * 32), TENANT, RequestKind.INFERENCE) is None


def test_lengths_follow_a_change() -> None:
    """Old values are forgotten."""
    lengths = OutputLengths()
    for value in [1000] * 500 + [20] * SAMPLES_KEPT:
        lengths.observe(MODEL, TENANT, RequestKind.INFERENCE, value)
    assert lengths.expected(MODEL, TENANT, RequestKind.INFERENCE) == 20


def test_memory_of_lengths_is_bounded() -> None:
    """Many tenants push out the one seen longest ago, and no more."""
    lengths = OutputLengths(keys_max=5)
    for index in range(100):
        for _ in range(SAMPLES_MIN):
            lengths.observe(MODEL, Tenant(f"t{index}"), RequestKind.INFERENCE, index)
    assert len(lengths._rings) == 5
    assert lengths.expected(MODEL, Tenant("t99"), RequestKind.INFERENCE) == 99
    assert lengths.expected(MODEL, Tenant("t96"), RequestKind.INFERENCE) == 96
    lengths.forget(MODEL)
    assert lengths.expected(MODEL, Tenant("t99"), RequestKind.INFERENCE) is None


@given(st.lists(st.integers(0, 5000), min_size=SAMPLES_MIN, max_size=300))
def test_quantile_is_that_of_the_last_values(values: list[int]) -> None:
    """The ring's answer equals sorting the last values."""
    lengths = OutputLengths()
    for value in values:
        lengths.observe(MODEL, TENANT, RequestKind.INFERENCE, value)
    latest = sorted(values[-SAMPLES_KEPT:])
    wanted = max(1, latest[math.ceil(0.75 * len(latest)) - 1])
    assert lengths.expected(MODEL, TENANT, RequestKind.INFERENCE) == wanted


def test_learned_length_enters_the_profile() -> None:
    """Expected output, ratio and pages follow what the model does for this tenant."""
    lengths = OutputLengths()
    for _ in range(SAMPLES_MIN):
        lengths.observe(MODEL, TENANT, RequestKind.INFERENCE, 900)
    fields = BodyFields(model="a", max_tokens=2000)
    result = build_profile(record(), Endpoint.CHAT, fields, [list(range(100))], CONTEXT, lengths)
    assert (result.expected_output_tokens, result.token_ratio, result.kv_pages_needed) == (900, 9.0, 32)
