"""Sizes as people write them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*([0-9]{1,16})(\.[0-9]{1,6})?\s*([A-Za-z]{0,3})\s*", re.ASCII)
_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for infix, base in (("I", 1024), ("", 1000))
}
_BYTES_MAX = 2**53
_SHOWN_CHARS_MAX = 40


def parse_size(text: str | int) -> int:
    """Bytes from ``64MiB``, ``1.5 gb`` or a plain number; at least 1. Units are binary or decimal as written.

    Raises:
        ValueError: not a size; the message has the remedy.
    """
    match = _SIZE.fullmatch(str(text))
    factor = _UNITS.get(match[3].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{repr(text)[:_SHOWN_CHARS_MAX]} is not a size; write it like 4GiB or 512MiB")
    size_bytes = int(match[1]) * factor + int(float(match[2] or 0) * factor)
    if not 1 <= size_bytes < _BYTES_MAX:
        raise ValueError("the size must be at least 1 byte and below 8 PiB; write it like 4GiB or 512MiB")
    return size_bytes
