"""Which spans running chains of requests still need (KVC-3).

A chain of requests (``chain_id``: an agent's loop, a pipeline of several models) runs while one of its requests runs, and
for a while after the last one ended. What its requests used, the next one reads again: it may leave memory, not the node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSettings:
    """Bounds."""

    linger_s: float = 60.0
    """A chain runs on for that long after the last of its requests ended."""
    request_s_max: float = 3600.0
    """A request whose end was never told counts as ended after that long."""
    chains_max: int = 10_000
    """More: the one that was heard of least lately is forgotten."""
    requests_per_chain_max: int = 256
    spans_per_chain_max: int = 2048
    """Of 256 tokens: four contexts of 128K. More: those that were used least lately are not protected."""
    spans_max: int = 500_000
    """Of all chains together. More: as for ``chains_max``."""


@dataclass(slots=True, eq=False)
class _Chain:
    heard_s: float
    running: dict[str, float] = field(default_factory=dict)
    """When each request began, the earliest first."""
    spans: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class RequestGraph:
    """Chains of requests by ``chain_id``, and the spans that they used last. Requests without a chain are not told."""

    def __init__(self, settings: ChainSettings | None = None) -> None:
        self._settings = settings or ChainSettings()
        self._chains: OrderedDict[str, _Chain] = OrderedDict()
        """The one not heard of for the longest time first."""
        self._users: dict[bytes, dict[str, None]] = {}
        """The chains that used a span."""
        self._spans = 0
        """Of each chain, in sum."""

    def __len__(self) -> int:
        return len(self._chains)

    def began(self, chain_id: str, request: str, now_s: float) -> None:
        """A request of the chain runs."""
        running = self._heard(chain_id, now_s).running
        running.pop(request, None)
        running[request] = now_s
        if len(running) > self._settings.requests_per_chain_max:
            del running[next(iter(running))]

    def used(self, chain_id: str, spans: Sequence[bytes], now_s: float) -> None:
        """A request of the chain read or wrote these spans: the next one will need them."""
        chain = self._heard(chain_id, now_s)
        for span in spans:
            if span in chain.spans:
                chain.spans.move_to_end(span)
            else:
                chain.spans[span] = None
                self._spans += 1
                self._users.setdefault(span, {})[chain_id] = None
        while len(chain.spans) > self._settings.spans_per_chain_max:
            span, _ = chain.spans.popitem(last=False)
            self._release(chain_id, span)
        while self._spans > self._settings.spans_max and len(self._chains) > 1:
            self._forget(next(iter(self._chains)))

    def ended(self, chain_id: str, request: str, now_s: float) -> None:
        """It ended, in whatever way; unknown ones are ignored."""
        chain = self._chains.get(chain_id)
        if chain is not None and chain.running.pop(request, None) is not None:
            # Before the ended ones are looked for: it lingers from now on.
            chain.heard_s = now_s
            self._chains.move_to_end(chain_id)

    def needs(self, span: bytes, now_s: float) -> bool:
        """Whether a chain that runs has used the span: it may be demoted, never dropped."""
        return any(self._runs(self._chains[chain_id], now_s) for chain_id in self._users.get(span, ()))

    def _heard(self, chain_id: str, now_s: float) -> _Chain:
        self._forget_ended(now_s)
        chain = self._chains.get(chain_id)
        if chain is None:
            chain = self._chains[chain_id] = _Chain(now_s)
            if len(self._chains) > self._settings.chains_max:
                self._forget(next(iter(self._chains)))
        chain.heard_s = now_s
        self._chains.move_to_end(chain_id)
        return chain

    def _runs(self, chain: _Chain, now_s: float) -> bool:
        if now_s - chain.heard_s < self._settings.linger_s:
            return True
        return any(now_s - began_s < self._settings.request_s_max for began_s in chain.running.values())

    def _forget_ended(self, now_s: float) -> None:
        """Looks at those not heard of for long; one that runs on is looked at again when it was silent as long once more."""
        while self._chains:
            chain_id, chain = next(iter(self._chains.items()))
            if now_s - chain.heard_s < self._settings.linger_s:
                return
            if self._runs(chain, now_s):
                chain.heard_s = now_s
                self._chains.move_to_end(chain_id)
            else:
                self._forget(chain_id)

    def _forget(self, chain_id: str) -> None:
        for span in self._chains.pop(chain_id).spans:
            self._release(chain_id, span)

    def _release(self, chain_id: str, span: bytes) -> None:
        self._spans -= 1
        users = self._users[span]
        del users[chain_id]
        if not users:
            del self._users[span]
