"""The wire format is frozen, and hostile bytes harm nothing (BUS-1, SEC-1, PAINS O2)."""

from __future__ import annotations

import math
import struct
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subjects import codec, messages
from subjects.errors import DecodeError
from subjects.ids import DeploymentKey, IngressId, ModelHash, RequestId, Tenant
from subjects.messages import (
    Alert,
    Endpoint,
    EngineType,
    HeldEntry,
    Lane,
    PoolDigest,
    RequestKind,
    RequestProfile,
    SlaClass,
    Ticket,
)
from tests.wire import golden

KINDS = golden.kinds()
FROZEN = golden.load()
UNIONS: list[Any] = [messages.ClaimReply, messages.Back, messages.WorkerCommand, messages.WorkerEvent]
WITH_FREE_FORM_MAPS = (
    "Alert",
    "InferRequest",
    "JournalRecord",
    "LoadModel",
    "ModelRecord",
    "PoolDigest",
    "PoolModel",
    "StepSent",
    "TransactionBegan",
)
TICKET_BYTES_MAX = 1024


def raw(payload: bytes) -> Any:
    """MessagePack as builtins."""
    return msgspec.msgpack.decode(payload)


def still_says(now: Any, then: Any) -> bool:
    """Whether everything that was said then is said now; fields may have been added since."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and still_says(now[key], value) for key, value in then.items())
    if isinstance(then, list):
        return isinstance(now, list) and len(now) == len(then) and all(map(still_says, now, then))
    return type(now) is type(then) and bool(now == then)


def test_every_message_has_golden_bytes() -> None:
    """A new message is frozen by ``python -m tests.wire.golden``; one that was frozen never goes away."""
    assert sorted(FROZEN) == sorted(KINDS)


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_frozen_bytes_are_understood_and_written_again(name: str) -> None:
    """What an older peer wrote is read without loss, and what we write still says the same."""
    message = codec.decode(FROZEN[name], KINDS[name])
    assert still_says(raw(codec.encode(message)), raw(FROZEN[name]))
    assert codec.decode(codec.encode(message), KINDS[name]) == message


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_unknown_fields_of_a_newer_peer_are_ignored(name: str) -> None:
    """On every level of every message, but for the maps that take any text by design."""
    grown = msgspec.msgpack.encode(extended(raw(FROZEN[name]), deep=name not in WITH_FREE_FORM_MAPS))
    assert codec.decode(grown, KINDS[name]) == codec.decode(FROZEN[name], KINDS[name])


def extended(value: Any, *, deep: bool) -> Any:
    """With a field of tomorrow in every map, or in the outermost only."""
    if isinstance(value, list) and deep:
        return [extended(item, deep=True) for item in value]
    if isinstance(value, dict):
        inner = {key: extended(item, deep=True) for key, item in value.items()} if deep else value
        return inner | {"a_field_of_tomorrow": "new"}
    return value


def test_a_known_ticket_has_these_bytes() -> None:
    """One message by hand, so that the golden file is not its own judge."""
    entry = HeldEntry(request=RequestId("g-1"), attempt=2, next_indexes=(3, 300))
    assert codec.encode(entry) == (
        b"\x83\xa7request\xa3g-1\xa7attempt\x02\xacnext_indexes\x92\x03\xcd\x01\x2c"  # a map of three
    )


def test_a_ticket_stays_small() -> None:
    """Under 1 KiB with every name as long as names may be and every number wide."""
    profile = RequestProfile(
        model_hash=ModelHash("f" * 64),
        deployment=DeploymentKey("d" * 64),
        endpoint=Endpoint.COMPLETIONS,
        tenant=Tenant("t" * 32),
        sla_class=SlaClass.SILVER,
        lane=Lane.LARGE,
        kind=RequestKind.FINE_TUNE_VALIDATION,
        max_tokens=1_000_000,
        stream=True,
        temperature=0.7,
        top_p=0.95,
        n=128,
        stop_count=16,
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        adapter="a" * 32,
        structured=True,
        tools=True,
        priority=-100_000,
        input_tokens=1_000_000,
        prompt_entropy=12.345,
        expected_output_tokens=1_000_000,
        token_ratio=123.456,
        history_turns=1_000,
        prefix_head=bytes(32),
        prefix_blocks=65_535,
        kv_pages_needed=65_536,
        preferred_engine=EngineType.OPENAI_HTTP,
        business_id="b" * 32,
        chain_id="c" * 36,
        environment="production",
        task_priority=10,
        deadline_unix_s=1_800_000_000.125,
        continuable=True,
    )
    ticket = Ticket(
        request=RequestId("gateway-eu-west-1-0123456789-1000000000"),
        attempt=3,
        publication=1_000,
        ingress=IngressId("gateway-eu-west-1-0123456789"),
        profile=profile,
    )
    encoded = codec.encode(ticket)
    assert len(encoded) < TICKET_BYTES_MAX
    assert codec.decode(encoded, Ticket) == ticket


# ----------------------------------------------------------------------------------------------------------- hostile bytes

SECRET = "sk-SECRET-prompt-text"
PICKLE = (
    b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
)
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "reserved byte": b"\xc1",
    "nil": b"\xc0",
    "a bare number": b"\x01",
    "json": b'{"request": "g-1"}',
    "pickle": PICKLE,
    "arrays 10,000 deep": b"\x91" * 10_000 + b"\xc0",
    "maps 10,000 deep": b"\x81\xa1a" * 10_000 + b"\xc0",
    "a known field 10,000 deep": b"\x81\xa7profile" + b"\x81\xa7profile" * 10_000 + b"\xc0",
    "an unknown field 10,000 deep": b"\x81\xa1x" + b"\x91" * 10_000 + b"\xc0",
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "a string of 4 GiB": b"\xdb\xff\xff\xff\xff" + b"x" * 10,
    "bytes of 4 GiB": b"\xc6\xff\xff\xff\xff" + b"x" * 10,
    "an extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
    "an extension": b"\xd6\x01" + bytes(4),
    "a timestamp": b"\xd6\xff" + bytes(4),
    "a bad timestamp": b"\xc7\x0c\xff" + b"\xff" * 12,
    "invalid utf-8": b"\x81\xa2\xff\xfe\x01",
    "an invalid utf-8 value": b"\x81\xa7request\xa2\xff\xfe",
    "a number as key": b"\x81\x01\x02",
    "a map as key": b"\x81\x81\x01\x02\x03",
    "a secret as tag": msgspec.msgpack.encode({"type": SECRET, SECRET: SECRET}),
    "a secret everywhere": msgspec.msgpack.encode(
        dict.fromkeys(("request", "attempt", "ingress", "worker", "sequence"), SECRET)
    ),
    "two messages": b"\x80\x80",
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_hostile_bytes_are_a_decode_error(case: str) -> None:
    """For every message and union: one kind of error, at once, that quotes nothing. ``{}`` alone may be a message."""
    started_s = time.monotonic()
    for kind in [*KINDS.values(), *UNIONS]:
        try:
            message = codec.decode(HOSTILE[case], kind)
        except DecodeError as error:
            assert SECRET not in str(error)
            assert error.__cause__ is None
            assert error.__suppress_context__
        else:
            # Messages of defaults and at most an id take any map that has it; what else it says is ignored.
            ids = [field.name for field in msgspec.structs.fields(kind) if field.required]
            assert message == kind(**dict.fromkeys(ids, SECRET))
    assert time.monotonic() - started_s < 10


NO_TOKENS = ("", "a b", "a.b", "*", ">", "a\r\nPUB b 0", "a\n", "../a", "\u00e4", "a" * 65)
ADDRESSES = ("ingress", "replica", "worker", "source", "target", "model_hash")


def addresses(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a message somebody is named to whom its receiver will send."""
    if isinstance(value, list):
        return [found for index, item in enumerate(value) for found in addresses(item, (*path, index))]
    if not isinstance(value, dict):
        return []
    named = [(*path, key) for key in value if key in ADDRESSES and isinstance(value[key], str)]
    return named + [found for key, item in value.items() for found in addresses(item, (*path, key))]


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_an_id_that_is_no_subject_token_is_a_decode_error(name: str) -> None:
    """The receiver would make a subject of it and break: one such ticket ended every replica that pulled it."""
    places = [path for path in addresses(raw(FROZEN[name])) if path[-1] != "source" or name == "MigrateKv"]  # else a folder
    assert places or name not in ("Claim", "Frames", "Held", "IngressTelemetry", "Ticket", "WorkerBeat", "WorkerSnapshot")
    for *way, last in places:
        for text in NO_TOKENS:
            message = raw(FROZEN[name])
            holder = message
            for step in way:
                holder = holder[step]
            holder[last] = text
            with pytest.raises(DecodeError):
                codec.decode(msgspec.msgpack.encode(message), KINDS[name])


WITH_DEPLOYMENT = sorted(name for name, kind in KINDS.items() if {"deployment", "model_hash"} <= {*kind.__struct_fields__})


@pytest.mark.parametrize("name", WITH_DEPLOYMENT)
def test_a_deployment_is_empty_in_frozen_bytes_and_else_a_hash(name: str) -> None:
    """Frozen messages are older than it. Whoever gets one that is no hash would make a subject of it."""
    assert codec.decode(FROZEN[name], KINDS[name]).deployment == ""  # type: ignore[attr-defined]
    full = golden.filled(KINDS[name])
    encoded = codec.encode(full)
    assert len(full.deployment) == 64 and codec.decode(encoded, KINDS[name]) == full
    for text in ("a" * 63, "A" * 64, "g" * 64, "a" * 64 + "\n", *NO_TOKENS[1:]):
        with pytest.raises(DecodeError):
            codec.decode(msgspec.msgpack.encode(raw(encoded) | {"deployment": text}), KINDS[name])


def test_the_messages_that_name_a_deployment() -> None:
    """Requests, digest rows, telemetry rows and records."""
    rows = ["ModelDemand", "ModelRecord", "PoolModel", "PoolReplica", "ReplicaReport", "RequestProfile"]
    assert ["CostsMeasured", *rows] == WITH_DEPLOYMENT


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_a_cut_message_is_a_decode_error(name: str) -> None:
    """At every byte."""
    for length in range(len(FROZEN[name])):
        with pytest.raises(DecodeError):
            codec.decode(FROZEN[name][:length], KINDS[name])


@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("width", ["d", "f"])
def test_numbers_that_are_not_finite_are_refused(number: float, width: str) -> None:
    """In 64 and 32 bits; a NaN passes every comparison with a bound the wrong way."""
    finite = codec.encode(Alert(at_unix_s=1.5, severity=messages.Severity.INFO, kind="k", scope="s", text="t"))
    one_and_a_half = b"\xcb" + struct.pack(">d", 1.5)
    assert one_and_a_half in finite
    hostile = finite.replace(one_and_a_half, (b"\xcb" if width == "d" else b"\xca") + struct.pack(f">{width}", number))
    with pytest.raises(DecodeError):
        codec.decode(hostile, Alert)


def test_bytes_that_only_look_like_a_nan_are_a_message() -> None:
    """A body may hold any bytes."""
    body = b"\xcb" + struct.pack(">d", math.nan) + b"\xca\x7f\x80\x00\x00"
    request = messages.InferRequest(body=body)
    assert codec.decode(codec.encode(request), messages.InferRequest) == request


@given(payload=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_message_or_a_decode_error(payload: bytes) -> None:
    """Nothing else comes out of the codec."""
    for kind in (Ticket, PoolDigest, messages.Frames, messages.WorkerCommand, messages.Back):
        try:
            codec.decode(payload, kind)  # type: ignore[arg-type]
        except DecodeError:
            continue


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_messages_are_messages_or_decode_errors(data: st.DataObject) -> None:
    """Real messages with bytes changed, put in or left out."""
    name = data.draw(st.sampled_from(sorted(FROZEN)))
    damaged = bytearray(FROZEN[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        message = codec.decode(bytes(damaged), KINDS[name])
    except DecodeError:
        return
    assert codec.decode(codec.encode(message), KINDS[name]) == message
