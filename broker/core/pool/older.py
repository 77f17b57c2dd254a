"""Older peers and journals, which named what is placed by its model hash: their messages with the deployment that it was.

A model hash names a deployment where all records of these files make one. Else it names none, and the replica of an older
worker is nobody's: it leaves.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from broker.core.pool.catalogue import Catalogue
from profiles.deployment import with_deployment
from subjects import messages as m

_Row = TypeVar("_Row", m.ReplicaReport, m.ModelDemand)


def told_by_worker(snapshot: m.WorkerSnapshot, catalogue: Catalogue) -> m.WorkerSnapshot:
    """A worker's snapshot."""
    if all(report.deployment for report in snapshot.replicas):
        return snapshot
    return msgspec.structs.replace(snapshot, replicas=tuple(_row(report, catalogue) for report in snapshot.replicas))


def told_by_gateway(telemetry: m.IngressTelemetry, catalogue: Catalogue) -> m.IngressTelemetry:
    """A gateway's counts; those of a model hash that names no deployment are left out."""
    if all(row.deployment for row in telemetry.demand):
        return telemetry
    rows = (_row(row, catalogue) for row in telemetry.demand)
    return msgspec.structs.replace(telemetry, demand=tuple(row for row in rows if row.deployment))


def kept_in_journal(entry: m.JournalEntry, catalogue: Catalogue) -> m.JournalEntry:
    """An entry of the journal."""
    if isinstance(entry, m.TransactionBegan):
        record = _record(entry.record, catalogue) if entry.record is not None else None
        deployments = entry.deployments or tuple(catalogue.deployment_of(files) for files in entry.model_hashes)
        return msgspec.structs.replace(entry, record=record, deployments=deployments)
    if isinstance(entry, m.StepSent) and isinstance(entry.command, m.LoadModel):
        command = msgspec.structs.replace(entry.command, record=_record(entry.command.record, catalogue))
        return msgspec.structs.replace(entry, command=command)
    return entry


def _row(row: _Row, catalogue: Catalogue) -> _Row:
    return row if row.deployment else msgspec.structs.replace(row, deployment=catalogue.deployment_of(row.model_hash))


def _record(record: m.ModelRecord, catalogue: Catalogue) -> m.ModelRecord:
    """What a load was to be of. Its KV is what was decided then, so that its own numbers do not tell its deployment."""
    named = catalogue.records.get(record.name)
    if not record.deployment and named is not None and named.model_hash == record.model_hash:
        return msgspec.structs.replace(record, deployment=named.deployment)
    return with_deployment(record)
