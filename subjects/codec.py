"""MessagePack on the wire, validated on decode (BUS-1). Golden bytes in ``tests/wire`` freeze the format."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from subjects.errors import DecodeError

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""Any message to bytes."""


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decode(payload: bytes, kind: type[T]) -> T:
    """``payload`` as a message of ``kind`` (a struct type or a union of tagged structs).

    Raises:
        DecodeError: the bytes are not such a message. The error never quotes the payload.
    """
    try:
        return cast("T", _decoder(cast("Hashable", kind)).decode(payload))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise DecodeError(f"{len(payload)} bytes are not a {name}: {_safe_reason(error)}") from None


def _safe_reason(error: Exception) -> str:
    # msgspec names the field path but can quote an invalid enum value or tag, which may be a client's text.
    text = str(error)
    return text if isinstance(error, msgspec.ValidationError) and "Invalid" not in text else type(error).__name__
