"""What the two halves of the engine's connector tell each other with every step, and what a request brings along.

The scheduler's half knows requests and tokens, the worker's half the tensors; vLLM carries these from one to the other, in
one process or several. Nothing here holds a token or a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcache.wire.messages import KvUse
from subjects.errors import DecodeError

PARAMS_KEY = "carpool"
"""Within vLLM's ``kv_transfer_params``; a client's own never get there."""


class KvRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request that may use the tiers brings into the engine, as ``kv_transfer_params``."""

    ready: int = 0
    """Leading blocks of its prompt that the node can be asked for."""
    asked: bool = False
    """Whether the node said so; else it did not answer in time."""
    deadline_s: float = 1.0
    """What computing those blocks would take: a load that takes longer is given up."""
    use: KvUse = KvUse()

    def params(self) -> dict[str, Any]:
        """As vLLM carries it."""
        return {PARAMS_KEY: msgspec.to_builtins(self)}

    @staticmethod
    def of(params: object) -> KvRequest | None:
        """What :meth:`params` gave; None for anything else.

        Raises:
            DecodeError: it is ours, and broken.
        """
        if not isinstance(params, dict) or PARAMS_KEY not in params:
            return None
        try:
            return msgspec.convert(params[PARAMS_KEY], KvRequest)
        except msgspec.ValidationError as error:
            raise DecodeError(f"kv_transfer_params: {error}") from None


class LoadBlocks(msgspec.Struct, frozen=True):
    """Read these blocks of one chain into these blocks of the engine."""

    request: str
    salt: bytes
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    deadline_s: float


class SaveBlocks(msgspec.Struct, frozen=True):
    """Give these consecutive blocks of one chain to the node; they are full once the step is over."""

    salt: bytes
    parent: bytes
    first: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    use: KvUse


class TellUsed(msgspec.Struct, frozen=True):
    """A request that ended used these blocks."""

    salt: bytes
    hashes: tuple[bytes, ...]
    use: KvUse


@dataclass(slots=True)
class StepOrders:
    """To the worker, with one step."""

    loads: list[LoadBlocks] = field(default_factory=list)
    saves: list[SaveBlocks] = field(default_factory=list)
    used: list[TellUsed] = field(default_factory=list)
    emptied: bool = False


@dataclass(slots=True)
class StepNews:
    """From the worker, after one step."""

    loaded: dict[str, int] = field(default_factory=dict)
    """Requests whose load is over, and how many leading blocks of it are there."""
    lost: list[bytes] = field(default_factory=list)
    """Blocks that were to be saved and are not at the node."""
    away: bool = False
    """The node broke off: nobody knows what it still has."""

    def __bool__(self) -> bool:
        return bool(self.loaded or self.lost or self.away)

    def merged(self, other: StepNews) -> StepNews:
        """Of two workers that each keep their own heads: a block is there when all have it."""
        loaded = {name: min(count, other.loaded.get(name, count)) for name, count in self.loaded.items()}
        loaded |= {name: count for name, count in other.loaded.items() if name not in loaded}
        return StepNews(loaded=loaded, lost=self.lost + other.lost, away=self.away or other.away)
