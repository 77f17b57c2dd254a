"""Why a model has what it has, and how a scale action went: what ``carpool explain`` tells (SCH-11).

Everything here reads the core and changes nothing, not even a cache that a later decision would see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from broker.core.plan.tunables import TURN_S
from broker.core.pool.describe import bytes_text, model_state, seconds_text
from broker.core.pool.journal import Recorded, Step, TransactionLog
from broker.core.pool.state import Demand, Replica
from broker.core.pool.transaction import Stage, Transaction
from broker.core.scheduler import SchedulerCore
from broker.scheduler.verbs import Row
from profiles.deployment import sharers
from subjects import messages as m

ACTIONS_MAX = 10
TRANSACTIONS_MAX = 5
_TRIMS = ("resize", "concurrency", "evict-kv", "migrate-kv")


def living(core: SchedulerCore, record: m.ModelRecord) -> list[Replica]:
    """The replicas of a model that are not dead."""
    return [replica for replica in core.pool.replicas_for(record.deployment) if not replica.dead]


def state_of(core: SchedulerCore, record: m.ModelRecord) -> str:
    """A model's state in one word."""
    states = {replica.report.state for replica in living(core, record)}
    return model_state(states, refused=bool(core.digests.told(record).refusal))


def explain_model(core: SchedulerCore, log: TransactionLog, record: m.ModelRecord, now_s: float, unix_s: float) -> Row:
    """All about one model now: what it has, why, what it waits for, and what would change it."""
    pool, catalogue = core.pool, core.catalogue
    demand = pool.inflow.demand(now_s).get(record.deployment, Demand())
    replicas = sorted(living(core, record), key=lambda replica: replica.replica)
    told = core.digests.told(record)
    shared = sharers(record, catalogue.by_name)
    actions = [entry for entry in reversed(core.digests.timeline(unix_s - now_s)) if entry.model == record.name]
    return {
        "model": record.name,
        "state": state_of(core, record),
        "mode": catalogue.mode(record.deployment).value,
        "sla_class": record.sla_class.value,
        "min_replicas": record.min_replicas,
        "max_replicas": record.max_replicas,
        "needs": _needs(record),
        "deployment": ", shared with ".join([record.deployment[:16], *filter(None, [", ".join(shared)])]),
        "waiting": demand.waiting,
        "running": demand.running,
        "oldest_wait_s": round(demand.oldest_wait_s, 3),
        "estimated_wait_s": told.estimated_wait_s,
        "replicas": [_replica(core, record, replica) for replica in replicas],
        "why": _why(core, record, told.refusal, actions),
        "costs": list(_costs(core, record)),
        "waits_for": list(_waits_for(core, record, now_s)),
        "would_change": list(_would_change(core, record, demand, replicas)),
        "actions": msgspec.to_builtins(actions[:ACTIONS_MAX]),
        "transactions": [
            explain_transaction(core, one, now_s, unix_s)
            for one in log.of_model(record.deployment, latest_max=TRANSACTIONS_MAX)
        ],
        "next_look_s": round(max(0.0, core.next_wake_s - now_s), 3),
    }


def _needs(record: m.ModelRecord) -> str:
    parts = (("weights", record.weights_bytes), ("KV", record.kv_bytes), ("overhead", record.overhead_bytes))
    text = f"{bytes_text(record.budget_bytes)} ({' + '.join(f'{what} {bytes_text(count)}' for what, count in parts)})"
    return f"{text} on each of {record.gpus} devices, which share weights and KV" if record.gpus > 1 else text


def _replica(core: SchedulerCore, record: m.ModelRecord, replica: Replica) -> Row:
    report = replica.report
    leaves = replica.replica in core.pool.leaving
    return {
        "replica": replica.replica,
        "where": f"{replica.worker}/{'+'.join(replica.devices)}",
        "state": f"{report.state.value}, leaving" if leaves else report.state.value,
        "state_s": round(report.state_s, 1),
        "running": report.running,
        "slots": report.slots,
        "budget_bytes": report.budget_bytes,
        "kv_bytes": report.kv_bytes,
        "weight": core.digests.weight(replica.replica),
        "held_by": _held_by(core, record, replica),
    }


def _held_by(core: SchedulerCore, record: m.ModelRecord, replica: Replica) -> str:
    if core.catalogue.locked(record.deployment):
        return "its model is locked"
    if core.pool.replica_locked(replica):
        return "it or its device is locked"
    if core.catalogue.pinned(record):
        return "its model is pinned"
    if 0 < len(core.pool.open_replicas(record.deployment)) <= record.min_replicas:
        return f"needed for the minimum of {record.min_replicas}"
    return ""


# -------------------------------------------------------------------------------------------------------------- reasons


def _why(core: SchedulerCore, record: m.ModelRecord, refusal: str, actions: Sequence[m.TimelineEntry]) -> list[str]:
    catalogue = core.catalogue
    model = catalogue.model(record.deployment)
    note, mode = core.notes.get(record.deployment), catalogue.mode(record.deployment)
    facts = (
        (note, f"{core.policy.name}: {note}"),
        (refusal, f"requests are refused: {refusal}"),
        (catalogue.locked(record.deployment), "a person locked it: nothing automatic starts, stops or changes its replicas"),
        (mode is not m.Mode.ACT, f"its mode is {mode.value}: the policy's decisions are not carried out"),
        (catalogue.pinned(record), "it is pinned: nothing evicts it"),
        (model.held_down, "a person unloaded it, and nobody has asked for it since"),
        (model.failures, f"its last load failed: {model.failure}"),
    )
    lines = [text for holds, text in facts if holds]
    # What it has comes from loads and unloads; between them its replicas are trimmed often.
    placed = next((entry for entry in actions if entry.action not in _TRIMS and entry.reason), None)
    trimmed = next((entry for entry in actions if entry.action in _TRIMS and entry.reason), None)
    for what, decided in (("last decision", placed), ("last trim", trimmed)):
        if decided is not None:
            outcome = decided.outcome or "under way"
            lines.append(f"{what}: {decided.action} on {decided.device or 'no device'}: {decided.reason} ({outcome})")
    return lines or ["nothing was decided about it yet"]


def _costs(core: SchedulerCore, record: m.ModelRecord) -> Iterator[str]:
    """Which numbers are gone by, and whether they are right."""
    for row in core.costs.rows(record):
        kept, steps = row.account.kept, row.account.window_steps
        points = f" with {kept.engine}, {len(kept.points)} points" if kept is not None and kept.points else ""
        source = f"{row.source.value}{points}"
        error = f", off by {row.error:.0%} over the last {steps} steps" if steps else ""
        wrong = ": they take another time for good" if row.account.deviates else ""
        yield f"on {row.device_type or 'the devices here'} {source}{error}{wrong}"


def _waits_for(core: SchedulerCore, record: m.ModelRecord, now_s: float) -> Iterator[str]:
    for transaction in core.transactions.running.values():
        comes = transaction.record is not None and transaction.record.deployment == record.deployment
        goes = any(victim.deployment == record.deployment and not victim.gone for victim in transaction.victims.values())
        asks = transaction.kv is not None and transaction.kv.kv_signature == record.kv_signature
        if comes or goes or asks:
            yield f"{transaction.name}: {stage_text(transaction, now_s)}"
    model = core.catalogue.model(record.deployment)
    if model.retry_s > now_s:
        yield f"no load before {seconds_text(model.retry_s - now_s)} have passed, after {model.failures} failed"


def stage_text(transaction: Transaction, now_s: float) -> str:
    """What a running transaction waits for, and since when."""
    since = seconds_text(now_s - transaction.stage_s)
    match transaction.stage:
        case Stage.LEAVING:
            left = ", ".join(victim.replica for victim in transaction.victims.values() if not victim.gone)
            return f"{left} drains and unloads, since {since} (drain bound {transaction.drain_s:g} s)"
        case Stage.WAITING:
            return f"waits for room on {'+'.join(transaction.devices)}, since {since}"
        case Stage.LOADING:
            return f"{transaction.replica or transaction.replica_name} loads, since {since}"
        case Stage.CHANGING:
            who = "the replica is being changed" if transaction.kv is None else f"the KV node of {transaction.worker} works"
            return f"{who}, since {since}"
        case Stage.DONE | Stage.ABORTED:
            return "over"


def _would_change(core: SchedulerCore, record: m.ModelRecord, demand: Demand, replicas: Sequence[Replica]) -> Iterator[str]:
    catalogue, name = core.catalogue, record.name
    failures = catalogue.model(record.deployment).failures
    locked, pinned = catalogue.locked(record.deployment), catalogue.pinned(record)
    if locked:
        yield f"`carpool unlock {name}`: the scheduler decides about it again"
    if catalogue.mode(record.deployment) is not m.Mode.ACT:
        yield f"`carpool mode {name} act`: what the policy decides is carried out"
    if pinned:
        yield f"`carpool unpin {name}`: others may take its room"
    places = {(replica.worker, device) for replica in replicas for device in replica.devices}
    closed = ("/".join(place) for place in places if core.pool.is_closed(*place) or core.pool.device_locked(*place))
    for device in sorted(closed):
        yield f"`carpool unlock --device {device}`: that device takes part again"
    if failures:
        yield f"`carpool apply` of a corrected service: its {failures} failed loads are forgotten"
    serving = [replica for replica in replicas if replica.replica not in core.pool.leaving]
    if not serving and not locked:
        yield _what_a_request_does(core, record)
    elif demand.waiting and len(serving) >= record.max_replicas:
        yield f"a higher max_replicas: it has {len(serving)} of at most {record.max_replicas}"
    if serving and not (record.min_replicas or pinned or locked) and not demand.any:
        yield "requests for models that lack room: it is idle, so it leaves before busy ones"
        if record.keep_s is not None:
            yield f"{record.keep_s:g} s without a request: it is unloaded"


def _what_a_request_does(core: SchedulerCore, record: m.ModelRecord) -> str:
    """What the next request for an unloaded model brings about, as far as the room tells."""
    usable = [device for device in core.pool.devices(usable=True) if device.report.memory_bytes >= record.budget_bytes]
    if not usable:
        return "a device with enough memory: none that may take work is large enough"
    free = max(usable, key=lambda device: (core.pool.room(device).free_planned_bytes, device.key))
    free_bytes = core.pool.room(free).free_planned_bytes
    if free_bytes >= record.budget_bytes:
        return f"a request: it is loaded, {bytes_text(free_bytes)} are free on {'/'.join(free.key)}"
    room = f"{bytes_text(record.budget_bytes)} needed, at most {bytes_text(max(0, free_bytes))} free"
    return f"a request: others leave for it ({room}); idle ones at once, busy ones after {TURN_S:g} s or more"


# ---------------------------------------------------------------------------------------------------------- transactions


def explain_transaction(core: SchedulerCore, one: Recorded, now_s: float, unix_s: float) -> Row:
    """A transaction with its steps, whose times count from its begin; ``outcome`` may be what it waits for."""
    began = one.began
    if (ended := one.ended) is not None:
        outcome = f"failed: {ended.failure}" if ended.failure else "done"
    else:
        running = next((t for t in core.transactions.running.values() if one.name == t.name), None)
        outcome = stage_text(running, now_s) if running is not None else "its leader is gone; what it left is looked into"
    if began.record is not None:
        model = began.record.name
    else:
        model = ", ".join(sorted({core.catalogue.name(deployment) for deployment in began.deployments}))
    return {
        "transaction": one.name,
        "kind": began.kind,
        "model": model,
        "where": f"{began.worker}/{'+'.join(began.devices)}" if began.devices else began.worker,
        "reason": began.reason,
        "begun_unix_s": began.at_unix_s,
        "took_s": round(ended.at_unix_s - began.at_unix_s, 3) if ended is not None else None,
        "outcome": outcome,
        "steps": [_step(step, began.at_unix_s, over=ended is not None) for step in one.steps.values()],
    }


def _step(step: Step, begun_unix_s: float, *, over: bool) -> Row:
    unknown = "no end was told" if over else "under way"
    sent, ended = step.sent, step.ended
    return {
        "operation": sent.operation,
        "what": command_text(sent.command),
        "sent_s": round(sent.at_unix_s - begun_unix_s, 3),
        "took_s": round(ended.at_unix_s - sent.at_unix_s, 3) if ended is not None else None,
        "outcome": unknown if ended is None else ended.failure or ended.detail or "done",
    }


def command_text(command: m.WorkerCommand) -> str:
    """A command as people read it."""
    match command:
        case m.LoadModel():
            return f"load {command.record.name} as {command.replica_name}"
        case m.DrainReplica():
            return f"drain {command.replica} within {command.timeout_s:g} s"
        case m.UnloadReplica():
            return f"unload {command.replica}{' by force' if command.force else ''}"
        case m.SetConcurrency():
            return f"let {command.replica} run {command.slots} at once"
        case m.ResizeKv():
            return f"give {command.replica} {bytes_text(command.kv_bytes)} of KV"
        case m.EvictKv():
            return f"drop {command.ratio:.0%} of its KV there"
        case m.MigrateKv():
            return f"pull its KV from {command.source_worker}"
        case _:
            return type(command).__name__
