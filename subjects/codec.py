"""MessagePack on the wire, validated on decode (BUS-1). Golden bytes in ``tests/wire`` freeze the format."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from subjects.errors import DecodeError

T = TypeVar("T")

# Half floats do not exist in MessagePack: a NaN or an infinity has 64 or 32 bits.
_NON_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]|\xca[\x7f\xff][\x80-\xff]")

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""Any message to bytes."""


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decode(payload: bytes, kind: type[T]) -> T:
    """``payload`` as a message of ``kind`` (a struct type or a union of tagged structs).

    Raises:
        DecodeError: the bytes are not such a message, or hold a NaN or an infinity. The error never quotes the payload.
    """
    try:
        message = cast("T", _decoder(cast("Hashable", kind)).decode(payload))
        # NaN compares false with every bound, so it may not get past the one place that checks. The scans take a fraction
        # of a microsecond; only a payload in which they find something is looked at closely.
        if (
            (b"\xcb\x7f" in payload or b"\xcb\xff" in payload or b"\xca\x7f" in payload or b"\xca\xff" in payload)
            and _NON_FINITE.search(payload)
            and _holds_non_finite(payload)
        ):
            raise DecodeError(f"{len(payload)} bytes hold a number that is not finite")
        return message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise DecodeError(f"{len(payload)} bytes are not a {name}: {_safe_reason(error)}") from None


def _holds_non_finite(payload: bytes) -> bool:
    waiting: list[Any] = [msgspec.msgpack.decode(payload)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, float):
            if not math.isfinite(value):
                return True
        elif isinstance(value, dict):
            waiting.extend(value)
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return False


def _safe_reason(error: Exception) -> str:
    # msgspec names the field path but can quote an invalid enum value or tag, which may be a client's text.
    text = str(error)
    return text if isinstance(error, msgspec.ValidationError) and "Invalid" not in text else type(error).__name__
