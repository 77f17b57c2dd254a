"""The connector's half in the engine's scheduler: which blocks of a request are loaded, which are saved, what was used.

It hashes a request's tokens itself (``profiles.blocks``), as they come, with the salt that the gateway gave the request. It
only ever offers what the node said is ready, whole blocks, and never a whole prompt, since one token must be computed. A
request whose load failed is not offered one again. What one request loads is not loaded by others meanwhile: they wait for
the end of that load, then the engine has those blocks itself.

Requests are vLLM's, used by these of their attributes: ``request_id``, ``all_token_ids``, ``num_tokens``,
``num_computed_tokens``, ``num_preemptions``, ``cache_salt``, ``kv_transfer_params``, ``sampling_params``,
``pooling_params``, ``prompt_embeds``, ``mm_features``, ``prefill_stats``. No vLLM, torch or IO in here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from kvcache.engine.orders import KvRequest, LoadBlocks, SaveBlocks, StepNews, StepOrders, TellUsed
from profiles.blocks import chain_hashes
from subjects.errors import DecodeError

log = structlog.get_logger(__name__)

KNOWN_MAX = 65_536
"""Blocks that are remembered as being at the node: two million tokens, some 8 MB."""
ON_ITS_WAY_S = 3.0
"""A block that was given to the worker to save is at the node after so long, or is not coming."""
USED_MAX = 1024
"""Ended requests whose use is not told yet; more are told by those that follow."""


@dataclass(slots=True)
class _Request:
    request: Any
    kv: KvRequest
    salt: bytes
    began_s: float
    hashes: list[bytes] = field(default_factory=list)
    saved: int = 0
    """Leading blocks that are at the node, on their way there, or given up."""
    local: int = 0
    """Leading blocks that the engine had itself when it asked last."""
    loading: int = 0
    """Blocks of the load under way."""
    loaded: int = 0
    """Leading blocks of it that are there; of several workers those of the poorest that has ended its own."""
    failed: bool = False


class SchedulerSide:
    """Used from the scheduler's thread. ``block_size`` is in tokens."""

    def __init__(self, block_size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_size = block_size
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._orders = StepOrders()
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._loads: dict[str, tuple[bytes, ...]] = {}
        """Blocks of the loads under way, by request; an aborted one's too, until its load has ended."""
        self._coming: dict[bytes, str] = {}
        """The same, by block."""
        self._refused_once: set[str] = set()
        self.scheduled_prompt_tokens = 0
        """Of the last step, of prompts: what prefill speed is measured by."""
        self.failed_loads = 0

    def came(self, request: Any) -> None:
        """The scheduler took a request."""
        try:
            kv = KvRequest.of(request.kv_transfer_params)
            salt = bytes.fromhex(request.cache_salt or "")
        except (DecodeError, ValueError) as error:
            self._without("its KV parameters cannot be read", type(error).__name__)
            return
        if kv is None:
            return
        reason = _unfit(request)
        if reason:
            self._without(reason)
            return
        state = _Request(request=request, kv=kv, salt=salt, began_s=self._clock())
        self._requests[request.request_id] = state
        self._hash(state)
        state.saved = min(kv.ready, len(state.hashes))
        self._know(state.hashes[: state.saved])
        if kv.asked:
            # The node had its say about the whole prompt: what it did not name is gone from there, or on its way.
            for block in state.hashes[state.saved :]:
                if state.began_s - self._known.get(block, state.began_s) > ON_ITS_WAY_S:
                    del self._known[block]

    def loadable(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond the ``computed_tokens`` that the engine has itself. It may be asked again.

        None: another request loads them at this moment, so ask again with the next step.
        """
        state = self._requests.get(request.request_id)
        if state is None or state.failed or state.loading:
            return 0
        state.local = computed_tokens // self._block_size
        most: int = min(state.kv.ready, len(state.hashes), (request.num_tokens - 1) // self._block_size)
        if most > state.local and state.hashes[state.local] in self._coming:
            return None
        return max(0, most - state.local) * self._block_size

    def allocated(self, request: Any, block_ids: Sequence[int], load_tokens: int) -> None:
        """The engine has blocks for what is to be loaded; called again, with 0 tokens, when it computes the rest."""
        state = self._requests.get(request.request_id)
        if state is None or load_tokens == 0:
            return
        first, count = state.local, load_tokens // self._block_size
        state.loading = state.loaded = count
        hashes = self._loads[request.request_id] = tuple(state.hashes[first : first + count])
        for block in hashes:
            self._coming.setdefault(block, request.request_id)
        self._orders.loads.append(
            LoadBlocks(
                request=request.request_id,
                salt=state.salt,
                hashes=hashes,
                block_ids=tuple(block_ids[first : first + count]),
                deadline_s=state.kv.deadline_s,
            )
        )

    def orders(self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]) -> StepOrders:
        """What the worker is to do with this step, in which these requests compute so many tokens each."""
        prompt_tokens = 0
        for name, tokens in scheduled.items():
            if tokens > 1:
                prompt_tokens += tokens
            state = self._requests.get(name)
            if state is not None:
                self._save(state, tokens, blocks_of)
        self.scheduled_prompt_tokens = prompt_tokens
        orders, self._orders = self._orders, StepOrders()
        return orders

    def heard(self, news: StepNews, over: Collection[str] = ()) -> None:
        """What the workers say after a step. ``over`` are the requests whose load all of them have ended by now."""
        if news.away:
            self._known.clear()
        for block in news.lost:
            self._known.pop(block, None)
        for name, blocks in news.loaded.items():
            if (state := self._requests.get(name)) is not None:
                state.loaded = min(state.loaded, blocks)
        for name in over:
            self._load_is_over(name)

    def ended(self, request: Any) -> None:
        """A request is over, whatever the reason; its load, if one is under way, ends by itself."""
        state = self._requests.pop(request.request_id, None)
        if state is None or len(self._orders.used) >= USED_MAX:
            return
        used = min(request.num_computed_tokens // self._block_size, len(state.hashes))
        if used and not state.loading:
            use = msgspec.structs.replace(state.kv.use, latency_s=max(0.0, self._clock() - state.began_s))
            self._orders.used.append(TellUsed(salt=state.salt, hashes=tuple(state.hashes[:used]), use=use))

    def emptied(self) -> None:
        """The engine's own cache was reset."""
        self._orders.emptied = True

    @property
    def requests(self) -> int:
        """How many are known; 0 when nothing runs."""
        return len(self._requests)

    # ------------------------------------------------------------------------------------------------------------ within

    def _hash(self, state: _Request) -> None:
        """Hashes the blocks whose tokens are known by now."""
        size, have = self._block_size, len(state.hashes)
        full = state.request.num_tokens // size
        if full > have:
            tokens = state.request.all_token_ids[have * size : full * size]
            state.hashes += chain_hashes(tokens, size, state.salt, state.hashes[-1] if have else b"")

    def _load_is_over(self, name: str) -> None:
        for block in self._loads.pop(name, ()):
            if self._coming.get(block) == name:
                del self._coming[block]
        state = self._requests.get(name)
        if state is None:
            return
        if state.loaded < state.loading:
            state.failed = True
            self.failed_loads += 1
            self._correct(state, state.loaded)
        state.loading = 0

    def _save(self, state: _Request, tokens: int, blocks_of: Callable[[str], Sequence[int]]) -> None:
        size = self._block_size
        # With asynchronous scheduling the last tokens may not be known yet; their blocks are saved a step later.
        full = min(state.request.num_computed_tokens + tokens, state.request.num_tokens) // size
        if full <= state.saved:
            return
        self._hash(state)
        block_ids: Sequence[int] | None = None
        first = state.saved
        state.saved = full
        while first < full:
            if state.hashes[first] in self._known:
                first += 1
                continue
            last = first + 1
            while last < full and state.hashes[last] not in self._known:
                last += 1
            if block_ids is None:
                block_ids = blocks_of(state.request.request_id)
            self._orders.saves.append(
                SaveBlocks(
                    salt=state.salt,
                    parent=state.hashes[first - 1] if first else b"",
                    first=first,
                    hashes=tuple(state.hashes[first:last]),
                    block_ids=tuple(block_ids[first:last]),
                    use=state.kv.use,
                )
            )
            self._know(state.hashes[first:last])
            first = last

    def _know(self, hashes: Sequence[bytes]) -> None:
        known, now_s = self._known, self._clock()
        for block in hashes:
            known[block] = now_s
            known.move_to_end(block)
        while len(known) > KNOWN_MAX:
            known.popitem(last=False)

    def _correct(self, state: _Request, blocks: int) -> None:
        """What was not loaded is not reused: the client's ``cached_tokens`` must not count it."""
        stats = state.request.prefill_stats
        if stats is not None and not state.request.num_preemptions:
            stats.set(
                num_prompt_tokens=stats.num_prompt_tokens,
                num_local_cached_tokens=state.local * self._block_size,
                num_external_cached_tokens=blocks * self._block_size,
            )

    def _without(self, reason: str, error: str = "") -> None:
        if reason not in self._refused_once:
            self._refused_once.add(reason)
            log.info("a request goes without KV tiers; others like it are not reported", reason=reason, error=error)


def _unfit(request: Any) -> str:
    """Why a request cannot use the tiers; empty when it can."""
    sampling = request.sampling_params
    if request.pooling_params is not None or sampling is None:
        return "it generates no text"
    if sampling.prompt_logprobs is not None:
        return "it asks for log probabilities of its prompt, which must be computed"
    if request.mm_features:
        return "its prompt has images or sounds, whose KV the tokens do not name"
    if request.prompt_embeds is not None:
        return "its prompt is embeddings, which have no tokens"
    if getattr(sampling, "skip_reading_prefix_cache", None):
        return "it asks for no cached prefix"
    return ""
