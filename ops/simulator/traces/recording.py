"""Our own recordings: what was asked for and how long the answers were, never prompts or answers.

A recording is a sequence of objects, as JSON lines (``.jsonl``) or as MessagePack objects one after the other
(``.msgpack``), either gzipped or not (``.gz``). The first may describe models, every other is one request::

    {"carpool_recording": 1, "models": {"chat": {"size": "8B"}, "big": {"size": "70B", "sla_class": "gold"}}}
    {"at_s": 0.0,   "model": "chat", "input_tokens": 812, "output_tokens": 120}
    {"at_s": 0.731, "model": "big", "input_tokens": 90, "output_tokens": 411, "sla_class": "bronze"}

``at_s`` counts from any instant (a Unix time in seconds will do) and is not negative; requests need not be in order.
``size`` is one of the simulator's models with known costs; a model that is not described is an 8B. Fields that are not
listed here (tenant, kind, lane, ...) are allowed and ignored, so that a recorded Request Profile can be written as it is;
fields with a prompt are refused.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import numpy as np

from ops.simulator.traces import limits
from ops.simulator.types import Trace
from subjects.errors import ConfigError
from subjects.messages import SlaClass

VERSION = 1
SIZE_DEFAULT = "8B"
PROMPT_FIELDS = ("prompt", "messages", "input", "text", "body")
"""A recording with any of these holds what it must not."""
OBJECT_BYTES_MAX = 1 << 20


class RecordedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model beside its name."""

    size: str = SIZE_DEFAULT
    sla_class: SlaClass = SlaClass.SILVER
    ttft_s: float = 2.0
    tpot_s: float = 0.1


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    at_s: float
    model: str
    input_tokens: int
    output_tokens: int
    sla_class: SlaClass | None = None
    """None: its model's."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first object, where there is one."""

    carpool_recording: int
    models: dict[str, RecordedModel] = {}


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A whole recording. ``trace.model`` indexes ``names``, which are sorted; its first request arrives at second 0."""

    names: tuple[str, ...]
    models: dict[str, RecordedModel]
    trace: Trace


def read_recording(path: Path) -> Recording:
    """Reads one, by the path's ending.

    Raises:
        ConfigError: an object that is neither header nor request, one that carries a prompt or what ``traces.limits``
            does not allow, another version, no request.
    """
    header = Header(carpool_recording=VERSION)
    requests: list[RecordedRequest] = []
    numbers: list[int] = []
    with cast("IO[bytes]", gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as file:
        for number, plain in enumerate(_objects(path, file), start=1):
            try:
                if number == 1 and "carpool_recording" in plain:
                    header = msgspec.convert(plain, Header)
                    _check_header(path, header)
                    continue
                if carried := sorted(set(PROMPT_FIELDS) & plain.keys()):
                    raise ConfigError(
                        f"{path}: object {number} carries {carried[0]!r}; recordings hold no prompts, remove it"
                    )
                request = msgspec.convert(plain, RecordedRequest)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{path}: object {number}: {error}; correct it or remove it") from None
            where = f"{path}: object {number}"
            limits.seconds(where, "at_s", request.at_s, limits.AT_S_MAX)
            limits.tokens(where, "input_tokens", request.input_tokens)
            limits.tokens(where, "output_tokens", request.output_tokens)
            requests.append(request)
            numbers.append(number)
    if not requests:
        raise ConfigError(f"{path}: no request in it; add one object per request")
    first, last = (pick(range(len(requests)), key=lambda place: requests[place].at_s) for pick in (min, max))
    if requests[last].at_s - requests[first].at_s > limits.SPAN_S_MAX:
        raise ConfigError(
            f"{path}: object {numbers[last]}: at_s: is over {limits.SPAN_S_MAX // 86_400} days after that of object "
            f"{numbers[first]}; cut the recording"
        )
    return _recording(path, header, requests)


def _check_header(path: Path, header: Header) -> None:
    if header.carpool_recording != VERSION:
        raise ConfigError(f"{path}: version {header.carpool_recording}; this reads version {VERSION}, record it again")
    for name, model in header.models.items():
        for field in ("ttft_s", "tpot_s"):
            limits.target(f"{path}: object 1", f"models.{name[:40]}.{field}", getattr(model, field))


def _objects(path: Path, file: IO[bytes]) -> Iterator[dict[str, Any]]:
    if ".msgpack" in path.suffixes:
        import msgpack  # type: ignore[import-untyped]  # it ships no types

        unpacker = msgpack.Unpacker(file, max_buffer_size=OBJECT_BYTES_MAX)
        try:
            yield from (_object(path, thing) for thing in unpacker)
        except (ValueError, msgpack.UnpackException) as error:
            raise ConfigError(
                f"{path}: {error or type(error).__name__}; this is no sequence of MessagePack objects"
            ) from None
        return
    for number, line in enumerate(file, start=1):
        if len(line) > OBJECT_BYTES_MAX:
            raise ConfigError(f"{path}:{number}: a line of more than {OBJECT_BYTES_MAX} bytes; write one request per line")
        if line.strip():
            try:
                yield _object(path, msgspec.json.decode(line))
            except (msgspec.DecodeError, RecursionError) as error:
                raise ConfigError(f"{path}:{number}: {error}; correct this line") from None


def _object(path: Path, thing: object) -> dict[str, Any]:
    if not isinstance(thing, dict):
        raise ConfigError(f"{path}: {type(thing).__name__} where an object should be; write one object per request")
    return thing


def _recording(path: Path, header: Header, requests: list[RecordedRequest]) -> Recording:
    requests.sort(key=lambda request: request.at_s)
    names = tuple(sorted({request.model for request in requests}))
    limits.models(str(path), len(names))
    number = {name: place for place, name in enumerate(names)}
    models = {name: header.models.get(name, RecordedModel()) for name in names}
    classes = tuple(SlaClass)
    own_class = any(request.sla_class is not None for request in requests)
    start_s = requests[0].at_s
    return Recording(
        names=names,
        models=models,
        trace=Trace(
            arrival_s=np.array([request.at_s - start_s for request in requests], dtype=np.float64),
            model=np.array([number[request.model] for request in requests], dtype=np.int16),
            input_tokens=np.array([max(request.input_tokens, 1) for request in requests], dtype=np.int32),
            output_tokens=np.array([max(request.output_tokens, 1) for request in requests], dtype=np.int32),
            sla_class=np.array(
                [classes.index(request.sla_class or models[request.model].sla_class) for request in requests], dtype=np.uint8
            )
            if own_class
            else None,
        ),
    )
