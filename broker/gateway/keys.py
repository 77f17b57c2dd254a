"""API keys of the HTTP gateway: who a request belongs to (SEC-1).

The file is YAML (or JSON, which is YAML too)::

    keys:
      - key: sk-...            # or  sha256: <64 hex digits of the key's SHA-256>
        tenant: search
        class: gold            # optional: overrides the model's class
    trust_domains:             # optional: tenants that may reuse each other's KV; all others reuse only their own
      research: [search, ads]

Only digests are kept in memory. Nothing here ever shows a key or a digest (PAINS H5).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from subjects.errors import ApiError, ConfigError
from subjects.ids import Tenant
from subjects.messages import SlaClass

KEY_LENGTH_MIN = 16
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Caller(msgspec.Struct, frozen=True):
    """Whom a request belongs to; ``sla_class`` None means the model's own class."""

    tenant: Tenant
    sla_class: SlaClass | None = None


ANYONE = Caller(Tenant("default"))
"""The caller where no keys are configured."""


_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: _Name
    key: str = ""
    sha256: str = ""
    sla_class: SlaClass | None = msgspec.field(default=None, name="class")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[list[_Entry], Meta(min_length=1)]
    trust_domains: dict[_Name, Annotated[list[_Name], Meta(min_length=1)]] = {}


@dataclass(eq=False, slots=True)
class ApiKeys:
    """Maps a presented key to its caller, in a time that tells nothing of how much of a key is right."""

    _callers: dict[bytes, Caller]
    trust_domains: dict[Tenant, str] = field(default_factory=dict)
    """By tenant, whose KV its requests may reuse; a tenant that is not in here reuses only its own."""

    @classmethod
    def of(cls, keys: dict[str, Caller]) -> ApiKeys:
        """From plain keys."""
        return cls({hashlib.sha256(key.encode()).digest(): caller for key, caller in keys.items()})

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Reads the file.

        Raises:
            ConfigError: one line with the place, the field and the remedy.
        """
        import yaml

        try:
            file = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), _File)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {type(error).__name__}") from None
        except yaml.YAMLError:
            raise ConfigError(f"{path}: is not YAML; write 'keys:' with a list of key and tenant") from None
        except msgspec.ValidationError as error:
            # The path of the field is safe to show, a quoted value may be a key.
            _, found, place = str(error).rpartition("`$.")
            field = place.rstrip("`") if found else "keys"
            remedy = "each key has key or sha256, tenant, and maybe class; each trust domain a list of tenants"
            raise ConfigError(f"{path}: {field}: is wrong; {remedy}") from None
        callers: dict[bytes, Caller] = {}
        for index, entry in enumerate(file.keys):
            digest = _entry_digest(path, index, entry)
            if digest in callers:
                raise ConfigError(f"{path}: keys[{index}]: the same key is given twice; remove one entry")
            callers[digest] = Caller(Tenant(entry.tenant), entry.sla_class)
        return cls(callers, _domains(path, file.trust_domains))

    def caller(self, authorization: str) -> Caller:
        """Whom ``Authorization: Bearer <key>`` belongs to.

        Raises:
            ApiError: 401; it never repeats what was presented.
        """
        scheme, _, presented = authorization.partition(" ")
        presented = presented.strip()
        if scheme.lower() != "bearer" or not presented:
            message = "You didn't provide an API key. Send it in the header 'Authorization: Bearer <key>'."
            raise ApiError(401, message, code="missing_api_key")
        # Found by its digest, however many keys there are. What time that takes depends on the digest of what was presented,
        # and nobody can choose a text whose digest begins as that of a key he does not know.
        found = self._callers.get(hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest())
        if found is None:
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        return found


def _domains(path: Path, members: dict[str, list[str]]) -> dict[Tenant, str]:
    """The domain of each tenant. Its name has a mark that no tenant's can have: it is never that of a tenant outside."""
    domains: dict[Tenant, str] = {}
    for name, tenants in members.items():
        for index, tenant in enumerate(tenants):
            if domains.setdefault(Tenant(tenant), f"domain:{name}") != f"domain:{name}":
                raise ConfigError(f"{path}: trust_domains.{name}[{index}]: this tenant is in two domains; remove one")
    return domains


def _entry_digest(path: Path, index: int, entry: _Entry) -> bytes:
    if bool(entry.key) == bool(entry.sha256):
        raise ConfigError(f"{path}: keys[{index}]: give either key or sha256")
    if entry.sha256:
        if _DIGEST.fullmatch(entry.sha256) is None:
            raise ConfigError(f"{path}: keys[{index}].sha256: expected 64 lower-case hex digits")
        return bytes.fromhex(entry.sha256)
    if len(entry.key) < KEY_LENGTH_MIN:
        raise ConfigError(f"{path}: keys[{index}].key: use at least {KEY_LENGTH_MIN} characters")
    return hashlib.sha256(entry.key.encode()).digest()
