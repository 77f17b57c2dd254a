"""Embeddings on their way from an engine to a gateway: deltas that each carry some of a request's vectors (ING-1).

A vector is JSON as the client gets it: a list of numbers, or a string with the base64 of its little-endian 32-bit floats.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from subjects.ids import RequestId
from subjects.messages import Delta, Usage

DETAIL_BYTES_MAX = 128 * 1024
"""A delta takes vectors until it is above this, so that frames stay small; one vector is never cut."""

EncodingFormat = Literal["float", "base64"]

_encode = msgspec.json.Encoder().encode


def embedding_deltas(
    request: RequestId, attempt: int, vectors: Sequence[bytes | msgspec.Raw], usage: Usage | None
) -> list[Delta]:
    """The whole answer; ``vectors`` are JSON in the order of the inputs, at least one. Each delta counts as one unit."""
    details = list(_details(vectors))
    last = len(details) - 1
    return [
        Delta(
            request=request,
            attempt=attempt,
            first_token_index=index,
            units=1,
            detail=detail,
            finish_reason="stop" if index == last else None,
            end=index == last,
            usage=usage if index == last else None,
        )
        for index, detail in enumerate(details)
    ]


def _details(vectors: Sequence[bytes | msgspec.Raw]) -> Iterator[bytes]:
    items: list[bytes] = []
    size = 0
    for index, vector in enumerate(vectors):
        items.append(b'{"index":%d,"embedding":%b}' % (index, bytes(vector)))
        size += len(items[-1])
        if size > DETAIL_BYTES_MAX or index == len(vectors) - 1:
            yield b'{"data":[' + b",".join(items) + b"]}"
            items, size = [], 0


def write_vector(numbers: Iterable[float], encoding: EncodingFormat) -> bytes:
    """A vector as JSON, rounded to 32 bits."""
    values = array("f", numbers)
    if encoding == "float":
        return _encode(values.tolist())
    if sys.byteorder == "big":
        values.byteswap()
    return b'"' + base64.b64encode(values.tobytes()) + b'"'


def rewritten(vector: bytes, encoding: EncodingFormat) -> bytes:
    """A vector as JSON in ``encoding``; as it is where it is in that form already.

    Raises:
        ValueError: it is no vector.
    """
    if vector[:1] == (b'"' if encoding == "base64" else b"["):
        return vector
    try:
        if encoding == "base64":
            return write_vector(msgspec.json.decode(vector, type=list[float]), encoding)
        values = array("f", base64.b64decode(msgspec.json.decode(vector, type=str), validate=True))
    except (msgspec.MsgspecError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if sys.byteorder == "big":
        values.byteswap()
    return _encode(values.tolist())
