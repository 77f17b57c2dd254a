"""Embeddings: vectors, their deltas, the simulated engine's, and the profile of such a request (ING-1, ING-4)."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import pytest

from broker.api.openai_bodies import INPUTS_MAX, parse_body
from broker.core.requests.admission import ModelView, Wish, no_model_fits, rank_models, task_refusal
from profiles.features import OutputLengths, RequestContext
from profiles.tokenizer import EstimatedTokenizer
from subjects.errors import ApiError
from subjects.ids import ModelHash, RequestId, Tenant
from subjects.messages import Delta, Endpoint, Failure, FailureKind, Lane, ModelRecord, RequestProfile, Task, Usage
from tests.core.profiled import build_profile
from workers.core.embeddings import DETAIL_BYTES_MAX, embedding_deltas, rewritten, write_vector
from workers.core.simulated import (
    EmitDeltas,
    RequestAborted,
    RequestAdded,
    SimulatedCore,
    SimulatedProfile,
    SimulatedRequest,
    Ticked,
    expected_embedding,
    parse_request,
)

REQUEST = RequestId("g-1")
NUMBERS = [0.25, -1.5, 3.0]
BASE64 = b'"' + base64.b64encode(struct.pack("<3f", *NUMBERS)) + b'"'
USAGE = Usage(prompt_tokens=3, completion_tokens=0)


def record(**fields: Any) -> ModelRecord:
    """An embedding model with a context of 100 tokens, 16 to a page."""
    values: dict[str, Any] = {"name": "m", "model_hash": ModelHash("0" * 64), "weights_hash": "w", "source": "s"}
    values |= {"weights_bytes": 1, "kv_bytes_per_token": 1, "kv_bytes": 1, "budget_bytes": 3, "max_context_len": 100}
    return ModelRecord(**values | {"block_size": 16, "task": Task.EMBED} | fields)


def body(**fields: Any) -> bytes:
    """A good body with changes."""
    return json.dumps({"model": "m", "input": "Hi"} | fields).encode()


# -------------------------------------------------------------------------------------------------------------- vectors


def test_a_vector_has_two_forms() -> None:
    """A list of numbers, or base64 of little-endian 32-bit floats; each can be made of the other without loss."""
    assert write_vector(NUMBERS, "base64") == BASE64
    assert json.loads(write_vector(NUMBERS, "float")) == NUMBERS
    assert rewritten(b"[0.25,-1.5,3]", "base64") == BASE64
    assert json.loads(rewritten(BASE64, "float")) == NUMBERS
    for vector, encoding in ((b"[0.1,  2e-3]", "float"), (BASE64, "base64")):
        assert rewritten(vector, encoding) == vector  # type: ignore[arg-type]


@pytest.mark.parametrize("vector", [b'"*"', b'"QUI="', b"null", b'{"a":1}', b"7", b'["a"]', b"[1e999]", b"[1"])
def test_what_is_no_vector_is_refused(vector: bytes) -> None:
    """Whatever a server sends, nothing but a ``ValueError`` comes of it."""
    with pytest.raises(ValueError):
        rewritten(vector, "float" if vector[:1] != b"[" else "base64")


def test_a_small_answer_is_one_delta_and_a_large_one_several() -> None:
    """Units in a row, the end and the usage on the last one, every vector once and in order, frames stay small."""
    (delta,) = embedding_deltas(REQUEST, 2, [b"[1]", b"[2]"], USAGE)
    assert json.loads(delta.detail) == {"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [2]}]}
    assert (delta.first_token_index, delta.units, delta.end, delta.finish_reason) == (0, 1, True, "stop")
    large = [b'"' + b"A" * 8192 + b'"'] * 100
    deltas = embedding_deltas(REQUEST, 2, large, USAGE)
    assert len(deltas) > 1 and [delta.first_token_index for delta in deltas] == list(range(len(deltas)))
    assert (
        [delta.end for delta in deltas] == [delta.usage == USAGE for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    )
    assert [one["index"] for delta in deltas for one in json.loads(delta.detail)["data"]] == list(range(100))
    assert all(len(delta.detail) < DETAIL_BYTES_MAX + 9000 for delta in deltas)


# ------------------------------------------------------------------------------------------------------ simulated engine


def parsed(**fields: Any) -> SimulatedRequest | Failure:
    """What the simulated engine makes of a body."""
    return parse_request(request=REQUEST, attempt=1, endpoint=Endpoint.EMBEDDINGS, body=body(**fields))


def answer_of(core: SimulatedCore, asked: SimulatedRequest) -> tuple[float, list[Delta]]:
    """The time of its end and what came out."""
    commands = core.step(0.0, RequestAdded(asked))
    now_s = 0.0
    while not commands and core.next_wake_s is not None:
        now_s = core.next_wake_s
        commands = core.step(now_s, Ticked())
    assert all(isinstance(command, EmitDeltas) for command in commands)
    return now_s, [delta for command in commands if isinstance(command, EmitDeltas) for delta in command.deltas]


def test_simulated_vectors_are_of_length_one_and_tell_inputs_apart() -> None:
    """The same input gives the same vector, another one another; fewer dimensions are the first ones at length 1."""
    one, other = expected_embedding("Hi"), expected_embedding("Ho")
    assert one == expected_embedding("Hi") and abs(sum(a * b for a, b in zip(one, other, strict=True))) < 0.5
    short = expected_embedding("Hi", 40)
    assert math.hypot(*one) == pytest.approx(1) == math.hypot(*short)
    assert [number / short[0] for number in short] == pytest.approx([number / one[0] for number in one[:40]])
    assert expected_embedding([1, 2]) != expected_embedding([12])
    assert len(expected_embedding("\ud800", 3)) == 3


@pytest.mark.parametrize(
    ("fields", "inputs", "tokens"),
    [
        ({"input": "12345"}, ["12345"], 2),
        ({"input": ["a", "12345678"]}, ["a", "12345678"], 3),
        ({"input": [5, 6, 7]}, [[5, 6, 7]], 3),
        ({"input": [[5, 6], [7]], "dimensions": 8}, [[5, 6], [7]], 3),
        ({"input": "a", "encoding_format": "base64"}, ["a"], 1),
    ],
)
def test_the_simulated_engine_embeds(fields: dict[str, Any], inputs: list[Any], tokens: int) -> None:
    """Every form of input, both encodings, fewer dimensions; usage counts all inputs and no output."""
    asked = parsed(**fields)
    assert isinstance(asked, SimulatedRequest)
    core = SimulatedCore(SimulatedProfile())
    ended_s, (delta,) = answer_of(core, asked)
    assert ended_s > 0 and delta.usage == Usage(prompt_tokens=tokens, completion_tokens=0)
    found = [one["embedding"] for one in json.loads(delta.detail)["data"]]
    if fields.get("encoding_format") == "base64":
        found = [list(struct.unpack("<256f", base64.b64decode(text))) for text in found]
    wanted = [expected_embedding(one, fields.get("dimensions", 256)) for one in inputs]
    assert len(found) == len(wanted)
    for vector, expected in zip(found, wanted, strict=True):
        assert vector == pytest.approx(expected, abs=1e-6)
    assert (core.running, core.waiting, core.kv_pages_free) == (0, 0, core.kv_pages)


def test_many_inputs_need_pages_for_the_longest_only() -> None:
    """A batch whose sum is beyond context and pages runs; one input that is beyond them does not."""
    core = SimulatedCore(SimulatedProfile(max_context_len=64, kv_pages=2, block_size=32))
    many = parsed(input=["x" * 4 * 64] * 20)
    assert isinstance(many, SimulatedRequest) and many.input_tokens == 1280
    assert answer_of(core, many)[1][-1].end
    long = parsed(input="x" * 4 * 65)
    assert isinstance(long, SimulatedRequest)
    (delta,) = answer_of(core, long)[1]
    assert delta.failure is not None and delta.failure.kind is FailureKind.BAD_REQUEST


def test_a_simulated_embedding_can_be_aborted_and_fail() -> None:
    """As any other request: nothing comes out after an abort, and a scripted failure is its whole answer."""
    core = SimulatedCore(SimulatedProfile())
    asked = parsed(carpool_sim={"first_token_s": 5.0})
    assert isinstance(asked, SimulatedRequest)
    assert core.step(0.0, RequestAdded(asked)) == []
    assert core.step(0.1, RequestAborted(REQUEST, 1)) == [] and (core.running, core.waiting) == (0, 0)
    failing = parsed(carpool_sim={"fail": "busy"})
    assert isinstance(failing, SimulatedRequest)
    (delta,) = answer_of(core, failing)[1]
    assert delta.end and delta.failure is not None and delta.failure.kind is FailureKind.BUSY


@pytest.mark.parametrize("fields", [{"dimensions": 257}, {"dimensions": 0}, {"input": []}, {"input": None}, {"input": {}}])
def test_what_the_simulated_engine_refuses(fields: dict[str, Any]) -> None:
    """Too many dimensions and no input are the client's fault."""
    failure = parsed(**fields)
    assert isinstance(failure, Failure) and failure.kind is FailureKind.BAD_REQUEST


# ------------------------------------------------------------------------------------------------------ bodies, profiles


def profiled(**fields: Any) -> RequestProfile:
    """The way from bytes to a profile, by estimated counts."""
    checked = parse_body(Endpoint.EMBEDDINGS, body(**fields))
    prompts = EstimatedTokenizer().prompts(Endpoint.EMBEDDINGS, checked.mapping)
    context = RequestContext(tenant=Tenant("t"), deadline_unix_s=1.0)
    return build_profile(record(), Endpoint.EMBEDDINGS, checked.asked, prompts, context, OutputLengths())


@pytest.mark.parametrize(
    ("inputs", "tokens", "pages"),
    [("12345", 2, 1), (["1234"] * 3, 3, 1), ([1] * 40, 40, 3), ([[1] * 40, [2] * 17, [3]], 58, 3), ([[1] * 100], 100, 7)],
)
def test_the_profile_of_a_request_for_embeddings(inputs: Any, tokens: int, pages: int) -> None:
    """All inputs count as work, the longest one as memory; there is no output, and no stream, to expect."""
    profile = profiled(input=inputs, stream=True, max_tokens=7, n=4)
    assert (profile.input_tokens, profile.kv_pages_needed, profile.lane) == (tokens, pages, Lane.SMALL)
    assert (profile.max_tokens, profile.expected_output_tokens, profile.n, profile.stream) == (0, 0, 1, False)
    assert not profile.continuable


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [-1]}, "input[...]"),
        ({"input": None}, "input"),
        ({"input": ["a"] * (INPUTS_MAX + 1)}, "input"),
        ({"input": "x" * 404}, "input"),
        ({"input": ["a", "x" * 404]}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"model": ""}, "model"),
    ],
)
def test_bad_bodies(fields: dict[str, Any], param: str) -> None:
    """A 400 that names the field; an input beyond the context is one too."""
    with pytest.raises(ApiError) as caught:
        profiled(**fields)
    assert caught.value.status == 400
    assert (caught.value.param or "").partition("[")[0] == param.partition("[")[0]


def test_what_the_engine_gets_is_the_clients_bytes() -> None:
    """Unless a withheld field must go."""
    raw = b'{"model": "m",  "input": "Hi", "unknown": 1.50}'
    assert parse_body(Endpoint.EMBEDDINGS, raw).raw == raw
    assert b"salt" not in parse_body(Endpoint.EMBEDDINGS, raw.replace(b'"unknown"', b'"cache_salt"')).raw


# ---------------------------------------------------------------------------------------------------------------- tasks


def test_a_model_says_what_it_can_do() -> None:
    """Either kind refuses the other's routes with a 400 that names what it can."""
    generates = record(task=Task.GENERATE)
    assert task_refusal(record(), Endpoint.EMBEDDINGS) is None is task_refusal(generates, Endpoint.CHAT)
    for one, endpoint, able in (
        (record(), Endpoint.CHAT, "embeddings"),
        (record(), Endpoint.COMPLETIONS, "embeddings"),
        (generates, Endpoint.EMBEDDINGS, "chat and text completions"),
    ):
        refusal = task_refusal(one, endpoint)
        assert refusal is not None and (refusal.status, refusal.param) == (400, "model")
        assert refusal.message.endswith(f"it can do {able}.")


def test_auto_chooses_among_models_for_the_task() -> None:
    """The better tier of the other task is no candidate (ING-5)."""
    views = [ModelView(record(name="e")), ModelView(record(name="g", task=Task.GENERATE, quality_tier=9))]
    assert [view.record.name for view in rank_models(Wish(task=Task.EMBED), views)] == ["e"]
    assert [view.record.name for view in rank_models(Wish(), views)] == ["g"]
    assert "for embeddings" in no_model_fits(Wish(task=Task.EMBED)).message
