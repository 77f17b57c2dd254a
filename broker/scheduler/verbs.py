"""What a person may ask of the scheduler and tell it: one struct per kind of ``ctl.<verb>``, read once from its JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from subjects.errors import ConfigError
from subjects.messages import DeclaredLoad, ModelRecord

Row = dict[str, Any]
"""Plain values for tables and JSON; names that end in ``_bytes`` or ``_s`` carry their unit."""
Verbs = dict[str, tuple[type[Any], Callable[[Any], Awaitable[Any]]]]
"""The argument of each verb, and who answers it."""
_Text = Annotated[str, Meta(min_length=1)]
_Event = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class OfModel(msgspec.Struct, frozen=True):
    """``unload``, ``delete``, ``pin``, ``unpin``: a model by its name or an alias."""

    model: _Text


class Named(msgspec.Struct, frozen=True):
    """``lock``, ``unlock``, ``drain``: exactly one thing; of a drain also how long running requests may take to finish."""

    model: _Text | None = None
    device: _Text | None = None
    replica: _Text | None = None
    worker: _Text | None = None
    bound_s: Annotated[float, Meta(ge=0, le=3600)] | None = None


class SetMode(OfModel, frozen=True):
    """``mode``: ``default`` gives the record its say again."""

    mode: str


class ProfileOf(OfModel, frozen=True):
    """``profile``: whole curves of a model for the next ``for_s`` seconds; 0: no longer."""

    for_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    batch_max: Annotated[int, Meta(ge=1, le=32)] = 32


class Declare(DeclaredLoad, frozen=True, kw_only=True):
    """``declare``: load that is expected, by its event's name."""

    name: _Event
    factor: Annotated[float, Meta(ge=0.01, le=1000)] = 1.0
    at_least: Annotated[float, Meta(ge=0, le=1e6)] = 0.0


class Withdraw(msgspec.Struct, frozen=True):
    """``withdraw``: that event."""

    name: _Event


class EvictKvOf(OfModel, frozen=True):
    """``evict-kv``: a share of what each worker keeps of a model's KV, or one of them."""

    ratio: Annotated[float, Meta(gt=0, le=1)]
    worker: str = ""


class MigrateKvOf(OfModel, frozen=True):
    """``migrate-kv``: between two workers, or the workers of two replicas."""

    source: _Text
    target: _Text
    timeout_s: Annotated[float, Meta(ge=1, le=3600)] = 600.0


class Apply(msgspec.Struct, frozen=True):
    """``apply``: models to register."""

    records: list[ModelRecord]


class What(msgspec.Struct, frozen=True):
    """``get``: which table; ``explain``: which thing."""

    what: _Text


def asked(kind: type[Any], argument: bytes) -> Any:
    """The argument of a verb; fields that it does not know are ignored, since a later command line may send more.

    Raises:
        ConfigError: which field is wrong, and what is expected there.
    """
    try:
        return msgspec.json.decode(argument, type=kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        field = f"{path.strip('.`')}: " if path.strip(".`") else ""
        raise ConfigError(f"{field}{what[:1].lower()}{what[1:]}") from None
