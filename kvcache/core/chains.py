"""Which spans running chains of requests still need (KVC-3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSettings:
    """Bounds."""

    linger_s: float = 60.0
    """A chain runs on for that long after the last of its requests ended."""
    request_s_max: float = 3600.0
    """A request whose end was never told counts as ended after that long."""
    chains_max: int = 10_000
    spans_per_chain_max: int = 2048


class RequestGraph:
    """Chains of requests by ``chain_id``, and the spans that they used last."""

    def __init__(self, settings: ChainSettings | None = None) -> None:
        raise NotImplementedError

    def began(self, chain_id: str, request: str, now_s: float) -> None:
        """A request of the chain runs."""
        raise NotImplementedError

    def used(self, chain_id: str, spans: Sequence[bytes], now_s: float) -> None:
        """A request of the chain read or wrote these spans: the next one will need them."""
        raise NotImplementedError

    def ended(self, chain_id: str, request: str, now_s: float) -> None:
        """It ended, in whatever way; unknown ones are ignored."""
        raise NotImplementedError

    def needs(self, span: bytes, now_s: float) -> bool:
        """Whether a chain that runs has used the span: it may be demoted, never dropped."""
        raise NotImplementedError
