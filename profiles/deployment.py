"""Deployment: what is placed. Services are one, and share their replicas, if the same files run in the same way for the same
tenant.

The key is of the model hash (files, precision, task, adapters' rank), of the replica's shape and of the tenant. The shape is
what an engine is started with: its type, longest context, KV bytes, devices, sequences, block size, slots for adapters,
whether and how KV outlives it, and the engine options. Not part of it is what is decided about replicas from outside (how
many, class, targets, prices, pins, waits, names, adapters' files), nor what is measured (costs), nor ``PARSING_OPTIONS``.
KV and storage know files, not deployments: what one computed serves the other where its layout is equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from subjects.codec import decode
from subjects.ids import DeploymentKey
from subjects.messages import ModelRecord

Option = TypeVar("Option")

PARSING_OPTIONS = ("reasoning_parser", "tool_call_parser", "tool_strict_level")
"""Engine options that make no other deployment: they read a request's body and its answer's text beside the engine, which
never sees them. Each request brings those of the name that it asked for (``Grant.options``). A chat template is none of
them: it makes other prompts, and the gateway counts those by the tokenizer of the files."""


def deployment_key(record: ModelRecord) -> DeploymentKey:
    """The key of a registry's record: SHA-256 in hex over JSON, keys in order, of what the module's docstring lists."""
    shape = {
        "adapters": record.adapters_max,
        "block": record.block_size,
        "context": record.max_context_len,
        "engine": record.engine_type.value,
        "gpus": record.gpus,
        "kv_bytes": record.kv_bytes,
        "kv_codec": record.kv_codec if record.kv_reuse else "",
        "kv_reuse": record.kv_reuse,
        "options": runs_with(record.engine_options),
        "seqs": record.max_num_seqs,
        "tenant": record.tenant,
    }
    told = msgspec.json.encode(shape, order="deterministic")
    return DeploymentKey(hashlib.sha256(b"carpool deployment 1\n%b\n%b\n" % (record.model_hash.encode(), told)).hexdigest())


def runs_with(options: Mapping[str, Option]) -> dict[str, Option]:
    """Those of a service's engine options that change what runs."""
    return {name: value for name, value in options.items() if name not in PARSING_OPTIONS}


def parses_with(options: Mapping[str, Option]) -> dict[str, Option]:
    """Those that only read requests and answers."""
    return {name: value for name, value in options.items() if name in PARSING_OPTIONS}


def with_deployment(record: ModelRecord) -> ModelRecord:
    """``record`` with its key; one that has it, whatever was decided about its KV since, keeps it."""
    return record if record.deployment else msgspec.structs.replace(record, deployment=deployment_key(record))


def sharers(record: ModelRecord, records: Iterable[ModelRecord]) -> list[str]:
    """The names of the others that share its replicas, in order."""
    return sorted(one.name for one in records if one.deployment == record.deployment and one.name != record.name)


def decode_record(payload: bytes) -> ModelRecord:
    """A record of the registry, from this version or an older one, with its deployment.

    Raises:
        DecodeError: the bytes are no such record.
    """
    return with_deployment(decode(payload, ModelRecord))
