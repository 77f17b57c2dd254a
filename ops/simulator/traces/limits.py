"""What a user's trace may hold at most, and the checks that say so in one line: file, line or object, field, remedy."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subjects.errors import ConfigError

TOKENS_MAX = 1 << 24
"""Input tokens, and output tokens, of one request."""
SPAN_S_MAX = 31 * 86_400
"""Seconds from the first request of a trace to its last."""
AT_S_MAX = 10_000_000_000
"""Seconds: a time of a recording, which may be a Unix time in seconds (but not in milliseconds)."""
TARGET_S_MAX = 86_400
"""Seconds: ``ttft_s`` and ``tpot_s`` of a model, which are above 0."""
RATE_RPS_MAX = 10_000
"""Requests per second of one client."""
MODELS_MAX = 4_096
TEXT_CHARS_MAX = 500
"""Characters of an error that quotes a file."""


def line_of(text: str) -> str:
    """``text`` as one printable line of bounded length: a file must not break the line or drive a terminal."""
    plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return plain if len(plain) <= TEXT_CHARS_MAX else f"{plain[: TEXT_CHARS_MAX - 3]}..."


def _short(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of over 128 bits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def tokens(where: str, field: str, value: Any) -> int:
    """A number of tokens, from a number or its text."""
    return _whole(where, field, value, TOKENS_MAX)


def milliseconds(where: str, field: str, value: Any) -> int:
    """Milliseconds since a trace began, from a number or its text."""
    return _whole(where, field, value, SPAN_S_MAX * 1_000)


def _whole(where: str, field: str, value: Any, most: int) -> int:
    try:
        number = -1 if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if not 0 <= number <= most:
        raise ConfigError(
            f"{where}: {field}: {_short(value)} is not a whole number from 0 to {most}; correct it or remove the request"
        )
    return number


def seconds(where: str, field: str, value: float, most: float) -> float:
    """``value`` itself, which is from 0 to ``most``."""
    if not (math.isfinite(value) and 0 <= value <= most):
        raise ConfigError(
            f"{where}: {field}: {_short(value)} is not a time from 0 to {most} seconds; correct it or remove the request"
        )
    return value


def target(where: str, field: str, value: float) -> None:
    """Refuses a target that no request can meet, or every one."""
    if not (math.isfinite(value) and 0 < value <= TARGET_S_MAX):
        raise ConfigError(
            f"{where}: {field}: {_short(value)} is not above 0 and up to {TARGET_S_MAX} seconds; write seconds such as 0.1"
        )


def models(where: str, count: int) -> None:
    """Refuses more models than can be simulated."""
    if count > MODELS_MAX:
        raise ConfigError(f"{where}: {count} models; keep the requests of at most {MODELS_MAX}")


def csv_rows(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """The rows of a ``csv.reader`` with their line numbers, without empty lines."""
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: not UTF-8 text after line {reader.line_num} ({error.reason}); save the file as UTF-8"
            ) from None
        except csv.Error as error:
            raise ConfigError(
                f"{path}:{max(reader.line_num, 1)}: not CSV ({error}); check the quotes of this line"
            ) from None
        if row:
            yield reader.line_num, row
