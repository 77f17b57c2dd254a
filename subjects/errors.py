"""The errors of Carpool.

::

    CarpoolError
    ├── BusError
    │   ├── BusUnavailable        not connected, or the connection was lost while waiting
    │   ├── NoResponders          nobody listens on the subject of a request
    │   ├── RequestTimeout        somebody may listen, but no reply came in time
    │   ├── PayloadTooLarge       more bytes than the server takes
    │   ├── QueueFull             the work-queue refused a ticket (a limit of its stream)
    │   ├── QueueMissing          the stream, bucket or consumer does not exist (any more)
    │   └── WrongRevision         a compare-and-set lost
    ├── DecodeError               bytes on the wire that are not the message expected there
    ├── ConfigError               a field of a file or a flag, with its remedy
    ├── ApiError                  what a client is told: HTTP status and OpenAI error fields
    └── EngineError               an engine failed, did not start, or refused what it was given
"""

from __future__ import annotations

import traceback
from pathlib import Path

_FRAMES_TOLD_MAX = 4


class CarpoolError(Exception):
    """Base of all errors of this project."""


class BusError(CarpoolError):
    """The bus could not do what was asked."""


class BusUnavailable(BusError):
    """Not connected, or the connection was lost while waiting."""


class NoResponders(BusError):
    """Nobody listens on the subject of a request."""


class RequestTimeout(BusError):
    """No reply came in time; whether somebody acted on the request is unknown."""


class PayloadTooLarge(BusError):
    """More bytes than the server takes."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"payload of {size_bytes} bytes is over the bus limit of {limit_bytes} bytes")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class QueueFull(BusError):
    """The work-queue refused a ticket because a limit of its stream is reached."""


class QueueMissing(BusError):
    """The stream, bucket or consumer does not exist (any more)."""


class WrongRevision(BusError):
    """A compare-and-set found another revision than expected."""


class DecodeError(CarpoolError):
    """Bytes on the wire that are not the message expected there."""


class ConfigError(CarpoolError):
    """A field of a file or a flag is wrong; the message names the place, the field and the remedy in one line."""


class EngineError(CarpoolError):
    """An engine failed, did not start, or refused what it was given."""


class ApiError(CarpoolError):
    """What a client is told.

    ``status`` is the HTTP status; ``type``, ``param`` and ``code`` are the fields of OpenAI's error object.
    ``retry_after_s`` is set on 429 and 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def place_of(error: BaseException) -> str:
    """``KeyError at pool.py:88 < placement.py:120``: what may be logged of an error that nobody foresaw.

    Its text is left out, since it may quote a prompt, an answer or a key.
    """
    frames = [f"{Path(frame.f_code.co_filename).name}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    where = " < ".join(reversed(frames[-_FRAMES_TOLD_MAX:]))
    return f"{type(error).__name__} at {where}" if where else type(error).__name__
