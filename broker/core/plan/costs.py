"""What a model's steps cost on each kind of device here, and where the numbers come from (PRO-4).

One book for all who plan. The order of the sources: what the model's file *gives*; a fit to what replicas *measured*; an
*estimate*, scaled by what is known on other kinds. Measured and estimated costs are *corrected* by one ratio, which follows
the steps that engines tell of: slowly, within bounds, and only from moments when nothing else ran on the device. Where steps
go on taking another time than was measured, the book asks for a new measurement.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from broker.core.plan import tunables as t
from broker.core.pool.catalogue import DeviceKey
from broker.core.pool.state import Device, Pool
from profiles.costs import engine_name, fit_costs, is_sane, median_error, sequences, sums_between, sums_of, work_s
from profiles.estimate import WITHOUT_DEVICE, Figures, estimate, figures, kind_figures, scaled
from subjects import messages as m
from subjects.ids import DeploymentKey, DeviceId, ReplicaId, WorkerId

SERVER = "server"
"""In place of a kind of device, for engines behind a URL: what they compute is no device's of this pool, so plans count next
to nothing for them, and their times are what answers tell."""


class Source(Enum):
    """Where costs come from."""

    GIVEN = "given"
    """By the model's file, or by the options of a simulated engine."""
    MEASURED = "measured"
    CORRECTED = "corrected"
    """Measured or estimated, and off by more than is normal: the engines' steps have the last word."""
    ESTIMATED = "estimated"


Key = tuple[str, str, int]
"""Deployment, kind of device, devices of a replica."""


@dataclass(slots=True)
class Account:
    """What is known of one deployment on one kind of device."""

    kept: m.KeptCosts | None = None
    """The latest of those in ``by_engine``: with engines of two versions at work, plans go by the one measured last."""
    by_engine: dict[str, m.KeptCosts] = field(default_factory=dict)
    fitted: m.StepCosts | None = None
    """As kept, or of a server as its answers tell."""
    ratio: float = 1.0
    """Running mean over steps of the time that they took, over what the costs say without correction."""
    correction: float = 1.0
    """The ratio as plans know it."""
    steps: int = 0
    off_since_s: float = math.inf
    """Since when the ratio says that the measurement is wrong; infinite: it does not."""
    deviates: bool = False
    """Whether that has lasted."""
    asked_ratio: float = 1.0
    """The ratio that the last new measurement was asked for at: one that explains nothing is not asked for again."""
    served: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Of a server: seconds to first tokens, their prompts' tokens, seconds of all further tokens, and how many."""
    windows: deque[m.StepSums] = field(default_factory=deque)
    """The last that happened, of ``t.CORRECTION_STEPS`` steps or a little more."""
    window_steps: int = 0

    def restart(self) -> None:
        """The costs are others now: what happened so far says nothing of them."""
        self.ratio = self.correction = 1.0
        self.steps = self.window_steps = 0
        self.windows.clear()
        self.off_since_s = math.inf
        self.deviates = False


class CostsRow(msgspec.Struct, frozen=True):
    """For people: one model on one kind of device."""

    model: str
    device_type: str
    source: Source
    costs: m.StepCosts
    account: Account
    """Without a measurement where the costs are given."""
    error: float
    """Median over the last steps that engines told of; NaN while there are none."""

    @property
    def points(self) -> tuple[m.CostPoint, ...]:
        """What was measured."""
        return self.account.kept.points if self.account.kept is not None else ()


class CostBook:
    """See the module's docstring. Reads the pool; what it is told comes from agents and from where costs are kept."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._accounts: defaultdict[Key, Account] = defaultdict(Account)
        self._sums: dict[WorkerId, dict[ReplicaId, m.StepSums]] = {}
        self._filled: dict[DeploymentKey, tuple[m.ModelRecord, int, m.ModelRecord]] = {}
        self._devices: list[Device] | None = None
        self._hardware = m.DeviceKind.CPU
        """GPU where there is any: what a model may run at once depends on it."""
        self._kinds: dict[str, tuple[Figures, frozenset[m.EngineType] | None]] = {}
        self._measuring: dict[ReplicaId, int] = {}
        """Who was last asked to measure, and up to which batch."""
        self._in_vain: set[ReplicaId] = set()
        """Those that tried all points and got none: they are not asked again."""
        self._profiled: dict[DeploymentKey, tuple[float, int]] = {}
        """Models of which somebody wants whole curves: until when, and up to which batch."""
        self.news = 0
        """Grows whenever plans should go by other costs."""
        self.unix_offset_s = 0.0

    # ------------------------------------------------------------------------------------------------------------ answers

    def costs_of(self, record: m.ModelRecord, device_type: str) -> tuple[m.StepCosts, Source]:
        """What plans go by on one kind of device."""
        given = record.costs.get(device_type)
        if given is not None:
            return given, Source.GIVEN
        self._look_at_kinds()
        account = self._accounts.get(_key(record, device_type))
        if device_type == SERVER and account is not None and account.fitted is not None:
            return account.fitted, Source.MEASURED
        if record.engine_type is not m.EngineType.VLLM:
            return self._estimate(record, device_type), Source.GIVEN
        base, source = self._base(record, device_type, account)
        if account is None:
            return base, source
        off = abs(account.correction - 1.0)
        if off > (t.DEVIATION_MAX if source is Source.MEASURED else t.CORRECTION_NEWS):
            source = Source.CORRECTED
        return _times(base, account.correction) if off else base, source

    def filled(self, record: m.ModelRecord) -> m.ModelRecord:
        """The record with costs for every kind of device here that has its engine. The same object as long as they are."""
        self._look_at_kinds()
        source, news, filled = self._filled.get(record.deployment, (None, 0, record))
        if source is record and news == self.news:
            return filled
        costs = {kind: _some(given) for kind, given in record.costs.items()}
        for kind, (_, engines) in self._kinds.items():
            if engines is None or record.engine_type in engines:
                costs[kind] = _some(self.costs_of(record, kind)[0])
        seats = sequences(record, self._hardware)
        if source is not record or (filled.costs, filled.max_num_seqs) != (costs, seats):
            same = (record.costs, record.max_num_seqs) == (costs, seats)
            filled = record if same else msgspec.structs.replace(record, costs=costs, max_num_seqs=seats)
        self._filled[record.deployment] = (record, self.news, filled)
        return filled

    def fastest(self, record: m.ModelRecord) -> m.StepCosts | None:
        """Those of the kind of device that computes its prompts fastest; None where no kind is known."""
        return min(self.filled(record).costs.values(), key=lambda costs: costs.prefill_token_s, default=None)

    def _base(self, record: m.ModelRecord, device_type: str, account: Account | None) -> tuple[m.StepCosts, Source]:
        """Without correction."""
        if device_type in record.costs:
            return record.costs[device_type], Source.GIVEN
        if account is not None and account.fitted is not None:
            return account.fitted, Source.MEASURED
        return self._from_elsewhere(record, device_type), Source.ESTIMATED

    def _from_elsewhere(self, record: m.ModelRecord, device_type: str) -> m.StepCosts:
        """The estimate, scaled by the first other kind on which more is known."""
        here = self._estimate(record, device_type)
        if record.engine_type is not m.EngineType.VLLM:
            return here
        measured = {kind: costs for kind, costs in record.costs.items() if kind != device_type}
        for (whose, kind, gpus), account in self._accounts.items():
            if (whose, gpus) == (record.deployment, record.gpus) and kind != device_type and account.fitted is not None:
                measured.setdefault(kind, account.fitted)
        other = min(measured, default="")
        return scaled(measured[other], self._estimate(record, other), here) if measured else here

    def _estimate(self, record: m.ModelRecord, device_type: str) -> m.StepCosts:
        known = self._kinds.get(device_type)
        return estimate(record, known[0] if known is not None else kind_figures(device_type))

    def _look_at_kinds(self) -> None:
        """Which kinds there are, by the first device of each, and what engines they can run (None: not told)."""
        devices = self._pool.devices(usable=False)
        if devices is self._devices:
            return
        self._devices = devices
        gpus = any(device.report.kind is m.DeviceKind.GPU for device in devices)
        before, self._hardware = self._hardware, m.DeviceKind.GPU if gpus else m.DeviceKind.CPU
        kinds: dict[str, tuple[Figures, frozenset[m.EngineType] | None]] = {}
        for device in devices:
            snapshot = device.worker.snapshot
            engines = frozenset(snapshot.engines) if snapshot is not None and snapshot.engines else None
            kind = device.report.device_type
            first, known = kinds.get(kind) or (figures(device.report), engines)
            kinds[kind] = (first, None if known is None or engines is None else known | engines)
        if kinds != self._kinds or before is not self._hardware:
            self._kinds = kinds
            self.news += 1

    # ----------------------------------------------------------------------------------------------------------- measured

    def measured(self, now_s: float, event: m.CostsMeasured, record: m.ModelRecord) -> m.KeptCosts | None:
        """Takes a replica's points; returns what is to be kept, or None when they say nothing."""
        points = tuple(point for point in event.points if is_sane(point.sums))
        account = self._accounts[_key(record, event.device_type)]
        old = account.by_engine.get(event.engine)
        anew = old is None or account.deviates
        if not points and (anew or not event.whole):
            if event.whole:
                self._in_vain.add(event.replica)
            return None
        cells = {} if anew or old is None else {_cell(point): point for point in old.points}
        for point in points:
            known = cells.get(_cell(point))
            if known is None or (known.beside and not point.beside):
                cells[_cell(point)] = point
            elif known.beside or not point.beside:  # Another round: they weigh alike.
                cells[_cell(point)] = msgspec.structs.replace(point, sums=sums_of(known.sums, point.sums))
        taken = tuple(cells.values())[-t.ZERO_RUN_MAX :]
        self._look_at_kinds()
        kept = m.KeptCosts(
            deployment=record.deployment,
            device_type=event.device_type,
            gpus=record.gpus,
            engine=event.engine,
            costs=fit_costs(taken, self._from_elsewhere(record, event.device_type)) if points or old is None else old.costs,
            points=taken,
            whole=event.whole or (not anew and old is not None and old.whole),
            at_unix_s=now_s + self.unix_offset_s,
        )
        self._take(account, kept)
        return kept

    def restore(self, entries: Iterable[m.KeptCosts]) -> None:
        """What was kept by an earlier life of this pool, or by the scheduler that leads; what is older than ours is not."""
        for kept in entries:
            account = self._accounts[kept.deployment, kept.device_type, kept.gpus]
            known = account.by_engine.get(kept.engine)
            if known is None or kept.at_unix_s > known.at_unix_s:
                self._take(account, kept)

    def forget(self, deployment: DeploymentKey) -> None:
        """Nobody has this model any more: what was not measured goes; what was stays known for who applies it again."""
        self._filled.pop(deployment, None)
        for key in [key for key, account in self._accounts.items() if key[0] == deployment and account.kept is None]:
            del self._accounts[key]

    def _take(self, account: Account, kept: m.KeptCosts) -> None:
        account.by_engine[kept.engine] = kept
        if account.kept is not None and kept.at_unix_s < account.kept.at_unix_s:
            return
        account.kept, account.fitted = kept, kept.costs
        account.restart()
        self.news += 1

    # ------------------------------------------------------------------------------------------------------ corrected live

    def observe(
        self, now_s: float, snapshot: m.WorkerSnapshot, records: Mapping[DeploymentKey, m.ModelRecord]
    ) -> list[tuple[m.ModelRecord, str, Account]]:
        """Takes what engines say of their steps; returns whose costs have just turned out to be wrong for good."""
        kinds = {device.device: device.device_type for device in snapshot.devices}
        before, self._sums[snapshot.worker] = self._sums.get(snapshot.worker, {}), {}
        known = self._sums[snapshot.worker]
        news = []
        for replica in snapshot.replicas:
            if replica.sums is None or replica.state is not m.ReplicaState.READY:
                continue
            last = before.get(replica.replica)
            window = sums_between(last, replica.sums) if last is not None else m.StepSums()
            if last is not None and 0 <= window.steps < t.SEEN_MIN:
                known[replica.replica] = last
                continue
            known[replica.replica] = replica.sums
            record = records.get(replica.deployment)
            if record is None or not is_sane(window) or self._has_company(replica, snapshot.replicas):
                continue
            kind = kinds.get(replica.device, "")
            account = self._accounts[_key(record, kind)]
            if self._follow(now_s, account, self._base(record, kind, account), window):
                news.append((record, kind, account))
        return news

    def _follow(self, now_s: float, account: Account, base: tuple[m.StepCosts, Source], window: m.StepSums) -> bool:
        """One window of steps; True when it makes a deviation a lasting one."""
        costs, source = base
        account.windows.append(window)
        account.window_steps += window.steps
        while account.window_steps - account.windows[0].steps >= t.CORRECTION_STEPS:
            account.window_steps -= account.windows.popleft().steps
        ratio = min(max(window.busy_s / max(work_s(costs, window), 1e-12), 1 / t.CORRECTION_MAX), t.CORRECTION_MAX)
        account.steps += window.steps
        share = max(1.0 - math.exp(-window.steps / t.CORRECTION_STEPS), window.steps / account.steps)
        account.ratio += share * (ratio - account.ratio)
        if account.steps < t.CORRECTED_STEPS_MIN:
            return False
        if source is not Source.GIVEN and abs(account.ratio / account.correction - 1.0) > t.CORRECTION_NEWS:
            account.correction = round(account.ratio, 3)
            self.news += 1
        if source is Source.ESTIMATED or abs(account.ratio - 1.0) <= t.DEVIATION_MAX:
            account.off_since_s, account.deviates = math.inf, False
            return False
        account.off_since_s = min(account.off_since_s, now_s)
        lasts = now_s - account.off_since_s >= t.DEVIATION_S and account.steps >= t.CORRECTION_STEPS
        if account.deviates or not lasts or abs(account.ratio / account.asked_ratio - 1.0) <= t.DEVIATION_MAX:
            return False
        account.deviates, account.asked_ratio = True, account.ratio
        return True

    def _has_company(self, replica: m.ReplicaReport, replicas: Sequence[m.ReplicaReport]) -> bool:
        """Whether another replica works, or measures, on one of its devices."""
        mine = {replica.device, *replica.peers}
        return any(
            (other.running or other.replica in self._measuring)
            and other.replica != replica.replica
            and not mine.isdisjoint((other.device, *other.peers))
            for other in replicas
        )

    def served(self, rows: Iterable[m.ModelDemand], records: Mapping[DeploymentKey, m.ModelRecord]) -> None:
        """Takes what gateways say of answers from servers: first tokens tell of prefill, the others of steps."""
        for row in rows:
            record = records.get(row.deployment)
            steps = row.output_tokens - row.finished
            if record is None or record.engine_type is not m.EngineType.OPENAI_HTTP or steps <= 0:
                continue
            if not 0 <= row.ttft_s_sum <= row.latency_s_sum < math.inf:
                continue
            account = self._accounts[_key(record, SERVER)]
            new = (row.ttft_s_sum, float(row.input_tokens), row.latency_s_sum - row.ttft_s_sum, float(steps))
            fade = 0.5 ** (steps / t.SERVED_TOKENS)
            account.served = [fade * old + more for old, more in zip(account.served, new, strict=True)]
            first_s, prompt_tokens, rest_s, rest = account.served
            account.steps += steps
            account.fitted = m.StepCosts(prefill_token_s=first_s / max(1.0, prompt_tokens), step_const_s=rest_s / rest)

    # ------------------------------------------------------------------------------------------------ what to measure next

    def profile(self, now_s: float, deployment: DeploymentKey, for_s: float, batch_max: int) -> None:
        """Somebody wants whole curves of a model for the next ``for_s`` seconds; 0: no longer."""
        known = self._profiled.get(deployment)
        if for_s and (known is None or known[0] <= now_s):
            for (whose, _, _), account in self._accounts.items():
                if whose == deployment and account.kept is not None:
                    account.kept = msgspec.structs.replace(account.kept, whole=False)
                    account.by_engine[account.kept.engine] = account.kept
        self._profiled[deployment] = (now_s + for_s, batch_max)

    def to_load(self, record: m.ModelRecord, worker: WorkerId, device: DeviceId) -> bool:
        """Whether a replica that is loaded there should measure before it serves."""
        kind = self._kind(worker, device)
        account = self._accounts.get(_key(record, kind))
        return self._measures(record, kind) and _kept(account, self._engine(worker, record)) is None

    def to_measure(self, now_s: float, records: Mapping[DeploymentKey, m.ModelRecord]) -> dict[ReplicaId, int]:
        """Who should measure in idle moments, and up to which batch: one replica of each deployment and kind, and one on a
        device, those first of which somebody wants a profile."""
        self._profiled = {whose: asked for whose, asked in self._profiled.items() if asked[0] > now_s}
        found: dict[ReplicaId, int] = {}
        taken: set[Key] = set()
        devices: set[DeviceKey] = set()
        self._in_vain.intersection_update(self._pool.replicas)
        for replica in sorted(self._pool.replicas_in_order(), key=lambda one: one.report.deployment not in self._profiled):
            record = records.get(replica.report.deployment)
            if record is None or replica.dead or replica.report.state is not m.ReplicaState.READY:
                continue
            if replica.replica in self._in_vain:
                continue
            kind = self._kind(replica.worker, replica.report.device)
            key = _key(record, kind)
            asked = self._profiled.get(record.deployment)
            mine = {(replica.worker, device) for device in replica.devices}
            if key in taken or not mine.isdisjoint(devices) or not (asked or self._measures(record, kind)):
                continue
            account = self._accounts.get(key)
            kept = _kept(account, self._engine(replica.worker, record))
            if asked or account is None or kept is None or not kept.whole or account.deviates:
                found[replica.replica] = asked[1] if asked else t.MEASURED_BATCH_MAX
                taken.add(key)
                devices |= mine
        self._measuring = found
        return found

    def _measures(self, record: m.ModelRecord, device_type: str) -> bool:
        return record.engine_type is m.EngineType.VLLM and device_type not in record.costs

    def _kind(self, worker: WorkerId, device: DeviceId) -> str:
        known = self._pool.device(worker, device)
        return known.report.device_type if known is not None else ""

    def _engine(self, worker: WorkerId, record: m.ModelRecord) -> str:
        known = self._pool.workers.get(worker)
        versions = known.snapshot.engine_versions if known is not None and known.snapshot is not None else {}
        version = versions.get(record.engine_type.value)
        return engine_name(record.engine_type, version) if version else ""

    # --------------------------------------------------------------------------------------------------------- for people

    def rows(self, record: m.ModelRecord) -> list[CostsRow]:
        """One for each kind of device here that the model could run on, and for each that it was measured on."""
        here = [SERVER] if record.engine_type is m.EngineType.OPENAI_HTTP else self.filled(record).costs
        kinds = {*here, *(kind for whose, kind, _ in self._accounts if whose == record.deployment)}
        rows = []
        for kind in sorted(kinds):
            costs, source = self.costs_of(record, kind)
            account = self._accounts.get(_key(record, kind)) or Account()
            if source is Source.GIVEN:
                account = replace(account, kept=None, correction=1.0)
            rows.append(CostsRow(record.name, kind, source, costs, account, median_error(costs, account.windows)))
        return rows


def _key(record: m.ModelRecord, device_type: str) -> Key:
    return record.deployment, device_type, record.gpus


def _cell(point: m.CostPoint) -> tuple[int, int, bool]:
    return point.batch, point.input_tokens, point.decodes


def _kept(account: Account | None, engine: str) -> m.KeptCosts | None:
    """What was measured with this engine; one whose version nobody told is taken to be that of the last measurement."""
    if account is None:
        return None
    return account.by_engine.get(engine) if engine else account.kept


def _some(costs: m.StepCosts) -> m.StepCosts:
    """Costs that plans can divide by: no prompt takes less time than one whose engine is on no device of ours."""
    least = WITHOUT_DEVICE.prefill_token_s
    return costs if costs.prefill_token_s >= least else msgspec.structs.replace(costs, prefill_token_s=least)


def _times(costs: m.StepCosts, factor: float) -> m.StepCosts:
    return m.StepCosts(**{part: factor * getattr(costs, part) for part in m.StepCosts.__struct_fields__})
