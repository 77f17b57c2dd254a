"""vLLM's door to the tiers: its ``KVConnectorBase_V1``, named to it by ``kv_connector_module_path``.

vLLM makes one in its scheduler and one beside the tensors. This module only translates: ``connector_scheduler`` and
``connector_worker`` do the work and know no vLLM. Importing it imports vLLM.

An engine whose KV is more than one group of full attention (sliding windows by the hybrid manager, Mamba states), that
spans pipeline stages, or that speculates, goes without tiers: its connector does nothing, and says so once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import structlog
from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvcache.core.identity import KvSignature
from kvcache.engine.orders import StepNews, StepOrders
from kvcache.engine.scheduler import SchedulerSide
from kvcache.engine.tensors import Blocks, HostBlocks, blocks_of, view_blocks
from kvcache.engine.worker import STAGING_BLOCKS_MIN, BlockClient, WorkerSide
from subjects.errors import CarpoolError, place_of

log = structlog.get_logger(__name__)

STAGING_BYTES_MAX = 128 << 20
"""On a CPU, where it is memory of the replica's budget; taken only as it is used."""
PINNED_BYTES_MAX = 512 << 20
"""On a GPU, of the host's memory."""
CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the replica tells the connector, as vLLM's ``kv_connector_extra_config``."""

    socket: str
    model_hash: str
    weights_hash: str
    kv_signature: str
    replica: str
    report: str
    """A file that the worker writes its ``KvSignature`` to (with its rank behind it) once it knows its tensors."""
    codec: str = "none"


class _Metadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM comes without types
    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class _WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    def __init__(self, news: StepNews) -> None:
        self.news = news

    def aggregate(self, other: Any) -> _WorkerMetadata:
        return _WorkerMetadata(self.news.merged(other.news))


class CarpoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. ``SupportsHMA`` keeps vLLM from switching its hybrid manager off for models we leave alone anyway."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = msgspec.convert(self._kv_transfer_config.kv_connector_extra_config, ConnectorConfig)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        reason = unfit(vllm_config, kv_cache_config)
        if reason:
            log.warning("this engine goes without KV tiers", reason=reason)
        elif role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(vllm_config.cache_config.block_size)
        self._fits = not reason

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped costs a later request time, nothing else."""
        return False

    # ------------------------------------------------------------------------------------------------ beside the tensors

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if not self._fits:
            return
        try:
            signature = self._begin(kv_caches)
        except (CarpoolError, RuntimeError, ValueError) as error:
            log.warning("this engine goes without KV tiers", reason=str(error).partition("\n")[0])
            return
        _write_whole(Path(f"{self.config.report}.{self._vllm_config.parallel_config.rank}"), msgspec.json.encode(signature))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before a step that reads them is made."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are saved at once, after the step."""

    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.start_saves(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self.worker.ended_loads() or None) if self.worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.failed_blocks() if self.worker is not None else set()

    def build_connector_worker_meta(self) -> _WorkerMetadata | None:
        if self.worker is None:
            return None
        news = self.worker.news()
        return _WorkerMetadata(news) if news else None

    # -------------------------------------------------------------------------------------------------- in the scheduler

    def on_new_request(self, request: Any) -> None:
        if self.scheduler is not None:
            self.scheduler.came(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self.scheduler.loadable(request, num_computed_tokens) if self.scheduler is not None else 0
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.scheduler is not None and num_external_tokens:
            self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self.scheduler is None:
            return _Metadata(StepOrders())
        resolve = self._kv_cache_manager.get_block_ids
        return _Metadata(self.scheduler.orders(scheduler_output.num_scheduled_tokens, lambda name: resolve(name)[0]))

    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler is None:
            return
        meta = connector_output.kv_connector_worker_meta
        news = meta.news if isinstance(meta, _WorkerMetadata) else StepNews()
        self.scheduler.heard(news, connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler is not None:
            self.scheduler.ended(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """The tiers stay: they are named by weights and tokens. Only what the engine itself had is gone."""
        if self.scheduler is not None:
            self.scheduler.emptied()
        return True

    def shutdown(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()

    # ------------------------------------------------------------------------------------------------------------ within

    def _begin(self, kv_caches: dict[str, Any]) -> KvSignature:
        signature, blocks = self._signature(kv_caches)
        staging_bytes = self._staging_bytes(signature, on_host=isinstance(blocks, HostBlocks))

        def make_client() -> BlockClient:
            from kvcache.wire.client import KvClient
            from kvcache.wire.messages import Attach

            config = self.config
            attach = Attach(
                model_hash=config.model_hash,
                weights_hash=config.weights_hash,
                signature=signature,
                replica=config.replica,
                codec=config.codec,
            )
            return KvClient(config.socket, attach)

        self.worker = WorkerSide(blocks, make_client, staging_bytes)
        return signature

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        return metadata.orders if isinstance(metadata, _Metadata) else StepOrders()

    def _staging_bytes(self, signature: KvSignature, *, on_host: bool) -> int:
        """Room for all that one step may fill, within bounds and never more than the engine's own cache."""
        blocks: int = self._vllm_config.scheduler_config.max_num_batched_tokens // signature.block_size + STAGING_BLOCKS_MIN
        blocks = min(blocks, self._kv_cache_config.num_blocks)
        return min(blocks * signature.block_bytes, STAGING_BYTES_MAX if on_host else PINNED_BYTES_MAX)

    def _signature(self, kv_caches: dict[str, Any]) -> tuple[KvSignature, Blocks]:
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        block_size = self._vllm_config.cache_config.block_size
        view = view_blocks(kv_caches, names, self._kv_cache_config.num_blocks, block_size)
        layer = self._vllm_config.compilation_config.static_forward_context.get(names[0])
        backend = layer.get_attn_backend().get_name() if hasattr(layer, "get_attn_backend") else ""
        parallel = self._vllm_config.parallel_config
        size = parallel.tensor_parallel_size
        signature = view.signature(
            model=self.config.kv_signature,
            block_size=block_size,
            backend=backend,
            isa=getattr(layer, "isa", ""),
            engine=f"vllm{__version__}",
            shard=f"{parallel.rank}/{size}" if size > 1 else "",
        )
        return signature, blocks_of(view)


def unfit(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why an engine cannot use the tiers; empty when it can."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"its KV cache has {len(groups)} groups"
    # Exactly these: a subclass keeps something else in its blocks.
    if type(groups[0].kv_cache_spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return f"its KV cache is of kind {type(groups[0].kv_cache_spec).__name__}"
    if vllm_config.cache_config.cache_dtype not in CACHE_DTYPES:
        return f"its KV cache has dtype {vllm_config.cache_config.cache_dtype}"
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return "it spans pipeline stages or splits contexts"
    if vllm_config.speculative_config is not None:
        return "it speculates"
    model = vllm_config.model_config
    if model is not None and (model.is_multimodal_model or model.runner_type == "pooling"):
        return "it takes images or sounds, or makes embeddings"
    return ""


def _write_whole(path: Path, data: bytes) -> None:
    """All or nothing; a report that cannot be written only costs the tiers."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.write_bytes(data)
        os.replace(fresh, path)
    except OSError as error:
        log.warning("the connector's report was not written", error=place_of(error))
