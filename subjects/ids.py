"""Identifiers: what each one names, and how it is drawn.

Every process that others address carries a *name plus an incarnation* drawn at process start and never reused, so that a
message meant for a dead process can reach nobody. All ids are single NATS subject tokens: letters, digits, ``-`` and ``_``.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, NewType

from msgspec import Meta

# Ids that a receiver makes a subject of are checked where a message is decoded: its answer goes to them, and one that is no
# token would break whoever tried. ``$`` alone also matches before a newline at the end.
_Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")]
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]

RequestId = NewType("RequestId", str)
"""``<ingress>-<counter>``: unique across restarts because the ingress id is."""
IngressId = NewType("IngressId", _Token)
"""A gateway process: name plus incarnation."""
ReplicaId = NewType("ReplicaId", _Token)
"""An engine process with one model: name plus incarnation."""
WorkerId = NewType("WorkerId", _Token)
"""A worker agent process: name plus incarnation."""
DeviceId = NewType("DeviceId", str)
"""A device of one worker, for example ``cpu0`` or ``gpu3``; unique within its worker."""
OperationId = NewType("OperationId", str)
"""One scale-action step; an agent applies each id at most once."""
ModelHash = NewType("ModelHash", _Sha256)
"""SHA-256 in 64 hex digits over weights, config, tokenizer and chat template (PRO-3)."""
DeploymentKey = NewType("DeploymentKey", Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$(?!\n)")])
"""SHA-256 in 64 hex digits of what is placed: a model hash, a replica's shape and a tenant (``profiles.deployment``). Empty
in messages of older peers, which placed by the model hash."""
ModelKey = NewType("ModelKey", str)
"""The first 16 hex digits of a deployment: the form used in subjects."""
Tenant = NewType("Tenant", str)

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HEX_64 = re.compile(r"[0-9a-f]{64}")
_INCARNATION_BYTES = 5


def is_token(text: str) -> bool:
    """Whether ``text`` may stand as one token of a subject."""
    return _TOKEN.fullmatch(text) is not None


def incarnated(name: str) -> str:
    """``name`` plus a fresh incarnation of 10 hex digits.

    Raises:
        ValueError: ``name`` is not a subject token or is longer than 48 characters.
    """
    if not is_token(name) or len(name) > 48:
        raise ValueError(f"name {name!r}: use 1 to 48 letters, digits, '-' or '_'")
    return f"{name}-{secrets.token_hex(_INCARNATION_BYTES)}"


def base_name(incarnated_id: str) -> str:
    """The name without its incarnation."""
    return incarnated_id.rpartition("-")[0]


def model_key(deployment: DeploymentKey) -> ModelKey:
    """The subject form of a deployment.

    Raises:
        ValueError: ``deployment`` is not 64 lower-case hex digits.
    """
    if _HEX_64.fullmatch(deployment) is None:
        raise ValueError("deployment: expected 64 lower-case hex digits")
    return ModelKey(deployment[:16])
