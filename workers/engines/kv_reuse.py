"""An engine's use of the KV tiers, on the replica's event loop: whether it has them, and what is ready for each request.

Before a request enters the engine its node is asked to make the longest prefix local (``prepare``), for at most as long as
computing that prefix would take. A node that does not answer is left alone until it does, so that it costs the requests of
one moment and no more. The connector inside the engine (``kvcache.engine.vllm_connector``) reads and saves the blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from kvcache.core.identity import SALT_BYTES, KvSignature
from kvcache.engine.orders import KvRequest
from kvcache.errors import KvRefused, KvUnavailable
from kvcache.wire.client import KvClient, KvNode
from kvcache.wire.messages import Attach, KvUse
from profiles.blocks import chain_hashes
from profiles.costs import prefill_s
from subjects.errors import CarpoolError, EngineError, place_of
from subjects.messages import ModelRecord, Task
from subjects.tasks import end_tasks
from workers.engines.base import EngineRequest
from workers.spec import ReplicaSpec

if TYPE_CHECKING:
    from workers.engines.vllm_openai import Prompt

log = structlog.get_logger(__name__)

CONNECTOR_MODULE = "kvcache.engine.vllm_connector"
CONNECTOR_CLASS = "CarpoolConnector"
PREPARE_S_MAX = 10.0
PREPARE_S_MIN = 0.1
LOAD_S_MIN = 0.25
"""A load is given this long even where computing would be quicker: what was started is mostly over by then."""
PREFILL_TOKENS_PER_S_UNKNOWN = 1000.0
"""For deadlines only, until a prompt was measured."""
QUICK_S = 0.05
"""A node that looks into its own memory answers in less; one that fetches from another node takes longer and still answers
pings."""
PING_S = 0.25
RETRY_S = 1.0
"""Between two looks whether a node that did not answer is back."""
SPEED_SMOOTHING = 0.2
SPEED_TOKENS_MIN = 64
"""Shorter prompts say little about the speed of prefilling."""
_REFUSED_ALLOCATION = "expandable_segments:True"
"""With it vLLM starts no engine that has a connector, whichever it is."""
_NOT_TEXT_ALONE = ("vision_config", "audio_config", "is_encoder_decoder")


def reuses_kv(spec: ReplicaSpec) -> bool:
    """Whether this replica's engine gets a connector: there is a node, the model allows it, and it is text in, text out."""
    record = spec.record
    wanted = bool(spec.kv_socket) and record.kv_reuse and bool(record.kv_signature) and record.task is Task.GENERATE
    if not wanted or "kv_transfer_config" in record.engine_options or not _text_alone(record):
        return False
    if _REFUSED_ALLOCATION in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        log.warning("this engine goes without KV tiers", reason=f"PYTORCH_CUDA_ALLOC_CONF has {_REFUSED_ALLOCATION}")
        return False
    return True


def _text_alone(record: ModelRecord) -> bool:
    # Once a multimodal model has a connector, vLLM would accept embeddings from clients in place of images; an encoder's
    # model it does not even start with one.
    try:
        config = json.loads((Path(record.source) / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return not any(config.get(name) for name in _NOT_TEXT_ALONE)


class KvReuse:
    """The tiers of one engine; used from one event loop, but for :attr:`speed`."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._record = spec.record
        # Beside the socket, where the next agent finds it if this process is killed before it was read.
        self._report = f"{spec.kv_socket}.{spec.replica}"
        self._signatures: tuple[KvSignature, ...] = ()
        self._nodes: tuple[KvNode, ...] = ()
        self._looking: asyncio.Task[None] | None = None
        self._away = False
        self.speed = PrefillSpeed(spec.record)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``EngineArgs``. Imports vLLM.

        Raises:
            EngineError: an engine with a connector runs in this process already; vLLM would mix up their tensors.
        """
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import has_kv_transfer_group

        from kvcache.engine.vllm_connector import ConnectorConfig

        if has_kv_transfer_group():
            raise EngineError("an engine with KV tiers runs in this process already: start each in one of its own")
        record = self._record
        config = ConnectorConfig(
            socket=self._spec.kv_socket,
            model_hash=record.model_hash,
            weights_hash=record.weights_hash,
            kv_signature=record.kv_signature,
            replica=self._spec.replica,
            codec=record.kv_codec,
            report=self._report,
        )
        transfer = KVTransferConfig(
            kv_connector=CONNECTOR_CLASS,
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=msgspec.to_builtins(config),
        )
        return {"kv_transfer_config": transfer}

    def open(self) -> bool:
        """The engine is built: reads what its workers say of their tensors. False: it goes without tiers."""
        try:
            self._signatures = tuple(msgspec.json.decode(path.read_bytes(), type=KvSignature) for path in self._reports())
        except (OSError, msgspec.DecodeError) as error:
            log.warning("this engine goes without KV tiers", reason=f"no report of its workers: {place_of(error)}")
            return False
        finally:
            self._remove_reports()
        sizes = {signature.block_size for signature in self._signatures}
        if sizes != {self._record.block_size}:
            # The gateway and this module name blocks by the model's own size.
            log.warning("this engine goes without KV tiers", reason=f"its blocks have {max(sizes)} tokens")
            return False
        self._nodes = tuple(KvNode(self._spec.kv_socket, self._attach(signature)) for signature in self._signatures)
        return True

    async def prepare(self, request: EngineRequest, prompts: Sequence[Prompt]) -> None:
        """Puts into each prompt's parameters what is ready of it. Takes no longer than computing it would."""
        if not self._nodes:
            return
        use = KvUse(
            tenant=request.tenant,
            request=request.request,
            sla_class=request.sla_class,
            chain_id=request.chain_id,
            test=request.test,
        )
        try:
            salt = bytes.fromhex(request.cache_salt)
        except ValueError:
            return
        if len(salt) != SALT_BYTES:
            return  # Nobody said whose it is, or its service keeps no KV: nobody may find it.
        ready = await asyncio.gather(*(self._ready(prompt.engine_input, salt, use) for prompt in prompts))
        for prompt, found in zip(prompts, ready, strict=True):
            if found is not None:
                prompt.params.extra_args = {**(prompt.params.extra_args or {}), "kv_transfer_params": found.params()}

    async def emptied(self) -> None:
        """The engine's own cache was reset; told at once, since an idle engine makes no step that could (PAINS F8)."""
        for signature in self._signatures:
            client = KvClient(self._spec.kv_socket, self._attach(signature))
            try:
                await asyncio.to_thread(client.emptied)
            except CarpoolError as error:
                log.debug("the KV node was not told of an empty engine", error=type(error).__name__)
            finally:
                client.close()

    async def close(self) -> None:
        """Closes the connections; calling again does nothing."""
        nodes, self._nodes = self._nodes, ()
        if self._looking is not None:
            await end_tasks([self._looking])
        for node in nodes:
            await node.close()
        self._remove_reports()

    # ------------------------------------------------------------------------------------------------------------ within

    def _attach(self, signature: KvSignature) -> Attach:
        record = self._record
        return Attach(
            model_hash=record.model_hash,
            weights_hash=record.weights_hash,
            signature=signature,
            replica=self._spec.replica,
            codec=record.kv_codec,
        )

    def _reports(self) -> list[Path]:
        """One of each worker of the engine."""
        return [Path(f"{self._report}.{rank}") for rank in range(self._record.gpus)]

    def _remove_reports(self) -> None:
        for path in self._reports():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    async def _ready(self, engine_input: Any, salt: bytes, use: KvUse) -> KvRequest | None:
        """None: this prompt uses no tiers."""
        if engine_input.get("type") != "token":
            return None
        tokens = engine_input["prompt_token_ids"]
        # One token is always computed, so that the first of the answer has something to come from.
        hashes = chain_hashes(tokens[: len(tokens) - 1], self._record.block_size, salt)
        if not hashes or self._away:
            return KvRequest(use=use)
        compute_s = len(hashes) * self._record.block_size / (self.speed.tokens_per_s or PREFILL_TOKENS_PER_S_UNKNOWN)
        deadline_s = min(PREPARE_S_MAX, max(PREPARE_S_MIN, compute_s))
        try:
            blocks = min(await asyncio.gather(*(self._ask(node, salt, hashes, deadline_s, use) for node in self._nodes)))
        except KvRefused:
            return KvRequest(use=use)
        except KvUnavailable as error:
            self._look_for_it(str(error))
            return KvRequest(use=use)
        return KvRequest(ready=blocks, asked=True, deadline_s=max(LOAD_S_MIN, deadline_s), use=use)

    async def _ask(self, node: KvNode, salt: bytes, hashes: Sequence[bytes], deadline_s: float, use: KvUse) -> int:
        asking = asyncio.ensure_future(
            node.prepare(salt, hashes, deadline_s=deadline_s, prefill_tokens_per_s=self.speed.tokens_per_s, use=use)
        )
        try:
            done, _ = await asyncio.wait({asking}, timeout=QUICK_S)
            if not done:
                await node.stats(timeout_s=PING_S)
            return await asking
        finally:
            if not asking.done():
                asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, CarpoolError):
                await asking

    def _look_for_it(self, reason: str) -> None:
        if not self._away and self._nodes:
            self._away = True
            log.warning("the KV node does not answer; prompts are computed until it does", reason=reason)
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while self._nodes:
            await asyncio.sleep(RETRY_S)
            try:
                for node in self._nodes:
                    await node.stats(timeout_s=RETRY_S)
            except CarpoolError:
                continue
            self._away = False
            log.info("the KV node answers again")
            return


class PrefillSpeed:
    """Prompt tokens that the engine computes in a second: as measured, before that by the model's costs, else 0."""

    def __init__(self, record: ModelRecord) -> None:
        chunk = 1024
        speeds = [chunk / seconds for costs in record.costs.values() if (seconds := prefill_s(costs, chunk)) > 0]
        self.tokens_per_s = max(speeds, default=0.0)
        self._measured = False

    def took(self, tokens: int, seconds: float) -> None:
        """A step, or the first token of a request, that computed so many tokens of prompts."""
        if tokens < SPEED_TOKENS_MIN or seconds <= 0:
            return
        speed = tokens / seconds
        if self._measured:
            speed = self.tokens_per_s + (speed - self.tokens_per_s) * SPEED_SMOOTHING
        self._measured = True
        self.tokens_per_s = speed
