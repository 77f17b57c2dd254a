"""The models a gateway knows: records of the registry, the digest's word on each, and their tokenizers."""

from __future__ import annotations

import math
import time

import structlog
from msgspec.structs import replace

from broker.core.pool.describe import model_state
from broker.core.requests.admission import ModelView
from broker.gateway.exchange import unavailable
from profiles.deployment import decode_record
from profiles.tokenizer import PromptTokenizer, Tokenizers
from subjects.bus import KvEntry
from subjects.errors import ApiError, CarpoolError, DecodeError
from subjects.ids import DeploymentKey, ModelHash
from subjects.messages import Adapter, ModelRecord, PoolDigest, PoolModel, ReplicaState

TOKENIZER_RETRY_S = 5.0
"""A tokenizer that did not load is tried again after this time, not for every request."""

log = structlog.get_logger(__name__)


class ModelTable:
    """Names and aliases to models and their adapters.

    A name always wins over an alias, and a model over an adapter; of two equal ones the first model by name.
    """

    def __init__(self) -> None:
        self._records: dict[str, ModelRecord] = {}
        self._others: dict[str, tuple[ModelRecord, Adapter | None]] = {}
        self._pool: dict[DeploymentKey, PoolModel] = {}
        self._states: dict[DeploymentKey, list[ReplicaState]] = {}
        self._tokenizers = Tokenizers()
        self._broken: dict[ModelHash, float] = {}
        """When its tokenizer did not load."""

    # ---- what is known

    def resolve(self, name: str) -> ModelView | None:
        """The model or adapter of that name or alias."""
        if (record := self._records.get(name)) is not None:
            return self._view(record)
        return self._view(*self._others[name]) if name in self._others else None

    def adapter_of(self, view: ModelView, name: str) -> ModelView | None:
        """The adapter of that name or alias of the view's model.

        Raises:
            ApiError: 400, the view is of another adapter already.
        """
        for adapter in view.record.adapters:
            if name == adapter.name or name in adapter.aliases:
                if view.adapter not in (None, adapter):
                    raise ApiError(400, "'model' and 'adapter' name two adapters; only one can answer.", param="adapter")
                return replace(view, adapter=adapter)
        return None

    def views(self) -> list[ModelView]:
        """All models by name."""
        return [self._view(self._records[name]) for name in sorted(self._records)]

    def adapters(self) -> list[ModelView]:
        """All adapters that can be asked for by name, by name, each of the model that answers under it."""
        names = {adapter.name: None for record in self._records.values() for adapter in record.adapters}
        views = (self.resolve(name) for name in sorted(names))
        return [view for view in views if view is not None and view.adapter is not None]

    def state(self, record: ModelRecord) -> str:
        """One word for people: the best state of its replicas, ``refused``, or ``unloaded``."""
        pool = self._pool.get(record.deployment)
        refused = pool is not None and bool(pool.refusal)
        return model_state(self._states.get(record.deployment, []), refused=refused)

    def _view(self, record: ModelRecord, adapter: Adapter | None = None) -> ModelView:
        states = self._states.get(record.deployment, [])
        return ModelView(record, self._pool.get(record.deployment), states.count(ReplicaState.READY), adapter)

    # ---- what arrives

    def record_changed(self, name: str, entry: KvEntry | None, *, only_newer: bool = False) -> None:
        """A change of the registry. A record that cannot be read leaves the last good one in place (PAINS N2)."""
        if entry is None:
            self._records.pop(name, None)
        else:
            try:
                record = decode_record(entry.value)
            except DecodeError as error:
                log.warning("a record of the registry cannot be read", model=name, error=str(error))
                return
            known = self._records.get(record.name)
            if only_newer and known is not None and known.revision >= record.revision:
                return
            self._records[record.name] = record
        self._index()

    def _index(self) -> None:
        known = {record.model_hash for record in self._records.values()}
        self._broken = {model: at_s for model, at_s in self._broken.items() if model in known}
        records = [self._records[name] for name in sorted(self._records)]
        others: list[tuple[str, ModelRecord, Adapter | None]] = [
            *((adapter.name, record, adapter) for record in records for adapter in record.adapters),
            *((alias, record, None) for record in records for alias in record.aliases),
            *((alias, record, adapter) for record in records for adapter in record.adapters for alias in adapter.aliases),
        ]
        self._others = {name: (record, adapter) for name, record, adapter in reversed(others)}

    def digest_changed(self, digest: PoolDigest) -> None:
        """A new word of the scheduler."""
        self._pool = {model.deployment: model for model in digest.models}
        self._states = {}
        dead = set(digest.dead)
        for replica in digest.replicas:
            if replica.replica not in dead:
                self._states.setdefault(replica.deployment, []).append(replica.state)

    # ---- tokenizers

    def loaded_tokenizer(self, record: ModelRecord) -> PromptTokenizer | None:
        """The model's tokenizer if it is loaded."""
        return self._tokenizers.peek(record)

    def load_tokenizer(self, record: ModelRecord) -> PromptTokenizer:
        """Loads it; call it in a thread.

        Raises:
            ApiError: 503 for this model only; its tokenizer is missing or broken.
        """
        if time.monotonic() < self._broken.get(record.model_hash, -math.inf) + TOKENIZER_RETRY_S:
            raise _broken_tokenizer(record)
        try:
            return self._tokenizers.get(record)
        except (CarpoolError, OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error) if isinstance(error, CarpoolError) else type(error).__name__
            log.warning("a tokenizer does not load", model=record.name, error=reason)
            self._broken[record.model_hash] = time.monotonic()
            raise _broken_tokenizer(record) from None


def _broken_tokenizer(record: ModelRecord) -> ApiError:
    # The reason can hold a path, which is the operator's business: it is in the log.
    message = f"The tokenizer of model '{record.name}' does not load; the gateway's log says why."
    return unavailable(message, "tokenizer_broken", round(TOKENIZER_RETRY_S))
