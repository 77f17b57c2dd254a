"""The models of the registry as the scheduler sees them, and what it remembers of each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from broker.core.pool.overrides import PINNED
from subjects.ids import DeploymentKey, DeviceId, ModelHash, WorkerId
from subjects.messages import DeclaredLoad, Mode, ModelRecord, OverrideKind, Overrides

DeviceKey = tuple[WorkerId, DeviceId]


@dataclass(slots=True)
class Model:
    """What is remembered of one deployment."""

    last_used_s: float = -math.inf
    load_s: float | None = None
    """Running mean of observed load times."""
    failures: int = 0
    """Failed loads in a row."""
    failure: str = ""
    retry_s: float = 0.0
    """No load before this time."""
    excuses: int = 0
    """Loads in a row that ended by no fault of the model."""
    early_deaths: int = 0
    """Replicas in a row that died soon after they were ready."""
    failed_on: DeviceKey | None = None
    resizes_kv: bool | None = None
    """Whether its replicas can change their KV budget while they run; None: none of them has said."""
    held_down: bool = False
    """A person unloaded it: only demand brings it back."""

    def clear(self) -> None:
        """Forgets failures: the model is ready, or was applied anew."""
        self.failures = self.excuses = self.early_deaths = 0
        self.failure = ""
        self.retry_s = 0.0
        self.failed_on = None
        self.held_down = False


class Catalogue:
    """Records by name and by hash. Several names may share a model, each with its own idea of the memory it needs; one of
    them speaks for it: replicas are loaded with that record. It is the first by name of those that do not stand back."""

    def __init__(self) -> None:
        self.records: dict[str, ModelRecord] = {}
        self.loaded = False
        """Whether the whole registry was read."""
        self.news = 0
        """Grows with every change."""
        self.all_co_locate = True
        """Whether no model wants a device for itself."""
        self.any_stay = False
        """Whether any model is pinned, locked, in a mode in which it is not acted for, or has a minimum of replicas."""
        self.declared: dict[str, DeclaredLoad] = {}
        """Load that people expect, by the name that they gave it."""
        self.shared: list[list[ModelRecord]] = []
        """Records of each model that has several names."""
        self._stand_back: frozenset[str] = frozenset()
        self.speaker: dict[DeploymentKey, ModelRecord] = {}
        """The record that speaks for each model."""
        self._of_files: dict[ModelHash, DeploymentKey] = {}
        self._models: dict[DeploymentKey, Model] = {}
        self.by_name: list[ModelRecord] = []
        self.by_deployment: list[ModelRecord] = []
        """All records, and the one that speaks for each model, in order of name."""
        self._pins: dict[str, bool] = {}
        self._pinned: set[DeploymentKey] = set()
        self._locks: dict[str, None] = {}
        self._locked: set[DeploymentKey] = set()
        self._modes: dict[str, Mode] = {}
        self._mode_of: dict[DeploymentKey, Mode] = {}

    def load(self, records: Iterable[ModelRecord]) -> None:
        """The whole registry."""
        self.records = {record.name: record for record in records}
        self.loaded = True
        self._index()

    def apply(self, record: ModelRecord) -> None:
        """Adds or replaces one; its failures are forgotten."""
        self.records[record.name] = record
        self.model(record.deployment).clear()
        self._index()

    def remove(self, name: str) -> None:
        """Forgets a name."""
        self.records.pop(name, None)
        self._index()

    def _index(self) -> None:
        self.news += 1
        records = self.records.values()
        self.all_co_locate = all(record.allow_co_location for record in records) and len({r.tenant for r in records}) <= 1
        self.speaker.clear()
        self._of_files.clear()
        self._pinned.clear()
        self._locked.clear()
        self._mode_of.clear()
        for name in sorted(self.records):
            record = self.records[name]
            self._mode_of.setdefault(record.deployment, self._modes.get(name, record.mode))
            if name in self._locks:
                self._locked.add(record.deployment)
            if self._pins.get(name, record.pinned):
                self._pinned.add(record.deployment)
        self.by_name = [self.records[name] for name in sorted(self.records)]
        names_of: dict[DeploymentKey, list[ModelRecord]] = {}
        for record in self.by_name:
            names_of.setdefault(record.deployment, []).append(record)
            if self._of_files.setdefault(record.model_hash, record.deployment) != record.deployment:
                self._of_files[record.model_hash] = DeploymentKey("")
        self.shared = [named for named in names_of.values() if len(named) > 1]
        for deployment, named in names_of.items():
            self.speaker[deployment] = min(named, key=lambda record: (record.name in self._stand_back, record.name))
        self.by_deployment = sorted(self.speaker.values(), key=lambda record: record.name)
        acts = all(mode is Mode.ACT for mode in self._mode_of.values())
        self.any_stay = not acts or bool(self._pinned or self._locked) or any(r.min_replicas for r in self.records.values())

    def stand_back(self, names: frozenset[str]) -> None:
        """These names, and no others, leave it to another of their model's names to speak for it."""
        if names != self._stand_back:
            self._stand_back = names
            self._index()

    def override(self, overrides: Overrides) -> None:
        """People's words about models, and the load that they expect, in place of what they said before."""
        entries = overrides.entries
        self._pins = {one.about: one.value == PINNED for one in entries if one.kind is OverrideKind.PIN}
        self._locks = {one.about: None for one in entries if one.kind is OverrideKind.MODEL_LOCK}
        self._modes = {one.about: Mode(one.value) for one in entries if one.kind is OverrideKind.MODE}
        # One that does not end after it begins is nothing that this release wrote: it announces nothing.
        self.declared = {
            one.about: one.load
            for one in entries
            if one.load is not None and one.load.begin_unix_s < one.load.end_unix_s and one.kind is OverrideKind.EVENT
        }
        self._index()

    def pinned(self, record: ModelRecord) -> bool:
        """Whether a model may not be evicted: one of the names that share it is pinned."""
        return record.deployment in self._pinned

    def locked(self, deployment: DeploymentKey) -> bool:
        """Whether one of the names that share a model is locked."""
        return deployment in self._locked

    def mode(self, deployment: DeploymentKey) -> Mode:
        """How far the scheduler may go with a model; with one that nobody applied it may do all."""
        return self._mode_of.get(deployment, Mode.ACT)

    def of_deployment(self, deployment: DeploymentKey) -> ModelRecord | None:
        """The record that speaks for a model, or None when nobody applied it."""
        return self.speaker.get(deployment)

    def deployment_of(self, model_hash: ModelHash) -> DeploymentKey:
        """The one deployment of these files; empty where there is none, or are several."""
        return self._of_files.get(model_hash, DeploymentKey(""))

    def model(self, deployment: DeploymentKey) -> Model:
        """The memory of a model, made when it is first asked for."""
        known = self._models.get(deployment)
        if known is None:
            known = self._models[deployment] = Model()
        return known

    def name(self, deployment: DeploymentKey) -> str:
        """A name for people."""
        record = self.of_deployment(deployment)
        return record.name if record is not None else deployment[:16]
