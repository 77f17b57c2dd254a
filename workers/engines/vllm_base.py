"""What both vLLM engines do alike: a request's way in (rendering, KV, adapter), the engine's arguments, the golden probe.

Light to import: vLLM itself is imported inside the methods, after :func:`workers.engines.vllm_process.prepare_process`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from profiles.costs import sequences
from subjects.errors import EngineError
from subjects.messages import Adapter, DeviceKind, Task
from workers.engines.adapter_gate import AdapterGate, AdapterRefused, adapter_arguments, lora_request
from workers.engines.base import EngineInfo, EngineRequest, PrefixHits, TaskEngine
from workers.engines.kv_reuse import KvReuse, reuses_kv
from workers.spec import ReplicaSpec

if TYPE_CHECKING:
    from workers.engines.vllm_embed import EmbeddingAnswer, EmbeddingLayer
    from workers.engines.vllm_openai import Answer, OpenAiLayer


class VllmBase(TaskEngine):
    """A vLLM engine, wherever its steps are made."""

    device_kind = DeviceKind.GPU
    chunk_tokens: int | None = None
    """Prompt tokens that one step takes where nothing is known of costs; None: as vLLM would have it."""

    def __init__(self, spec: ReplicaSpec) -> None:
        super().__init__()
        self._spec = spec
        seats = sequences(spec.record, self.device_kind)
        self._record = msgspec.structs.replace(spec.record, max_num_seqs=seats)
        self._embeds = spec.record.task is Task.EMBED
        self._gate = AdapterGate(spec.record, load=self._load_adapter, evict=self._evict_adapter)
        self._kv = KvReuse(spec) if reuses_kv(spec) else None
        self._engine: Any = None
        self._layer: OpenAiLayer | EmbeddingLayer | None = None
        self._kv_pages = 0
        self._hits = PrefixHits()

    async def warm(self, tokens: int) -> None:
        """Generates twice with greedy sampling: token ids must come, be equal, and have finite log probabilities.

        An embedding model embeds twice: equal vectors of finite numbers must come.
        """
        first = await self._probe(max(tokens, 1))
        if first != await self._probe(max(tokens, 1)):
            raise EngineError(f"{self._record.name}: the golden probe gave different answers; the engine is not sane")

    async def _probe(self, tokens: int) -> Sequence[float]:
        """What the golden probe gives: ``tokens`` token ids, or a vector.

        Raises:
            EngineError: it failed.
        """
        raise NotImplementedError

    async def _load_adapter(self, adapter: Adapter, slot_id: int) -> None:
        raise NotImplementedError

    async def _evict_adapter(self, slot_id: int) -> None:
        raise NotImplementedError

    def _arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``EngineArgs`` for the record, turns, adapters and KV tiers."""
        from workers.engines.vllm_openai import engine_arguments
        from workers.engines.vllm_turns import turn_arguments

        arguments = (
            engine_arguments(self._record, self.chunk_tokens) | turn_arguments(self._spec) | adapter_arguments(self._record)
        )
        return arguments if self._kv is None else arguments | self._kv.arguments()

    def _info(self, tokenizer: Any, *, sleeps: bool = False) -> EngineInfo:
        """What the engine can do, once it is built."""
        from vllm.v1.engine.detokenizer import uses_fast_detokenizer

        return EngineInfo(
            slots=self._record.max_num_seqs,
            kv_pages=self._kv_pages,
            block_size=self._record.block_size,
            max_context_len=self._engine.model_config.max_model_len,
            gives_token_ids=True,
            continues=not self._embeds and uses_fast_detokenizer(tokenizer),
            sleeps=sleeps,
        )

    async def _open_kv(self) -> None:
        """The engine is built: its tiers are opened, or it goes without them."""
        if self._kv is not None and not self._kv.open():
            await self._kv.close()
            self._kv = None

    async def _admitted(self, request: EngineRequest) -> tuple[Answer | EmbeddingAnswer, Any] | None:
        """A request rendered, its KV ready and its adapter (vLLM's form of it, or None) in the engine.

        None: it was refused, or had nothing left to generate; its deltas are in the outbox.
        """
        from workers.engines.vllm_openai import refused
        from workers.engines.vllm_refusals import Refused

        if self._layer is None:
            self._outbox.die(EngineError("the engine was given a request while it was not started"))
            return None
        try:
            answer = await self._layer.render(request)
            if answer.rendered.exhausted:
                self._outbox.put([answer.finish_exhausted()])
                return None
            if self._kv is not None:
                await self._kv.prepare(request, answer.rendered.prompts)
            if request.adapter is None:
                return answer, None
            slot_id = await self._gate.enter((request.request, request.attempt), request.adapter)
            return answer, lora_request(request.adapter, slot_id)
        except (Refused, AdapterRefused) as error:
            self._outbox.put([refused(request, error.failure)])
            return None
