"""Which models' KV a node has: a chain on disk knows weights and layout, the index speaks of model hashes.

Engines tell at ``Attach``, other nodes with each chain. What is known is kept in one small file beside the store, so that a
node that starts again can tell the index of its chains before the first engine comes.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from kvcache.core.identity import KvIdentity, KvSignature
from subjects.codec import decode, encode
from subjects.errors import DecodeError
from subjects.ids import ModelHash

FILE = "models.msgpack"
FILE_BYTES_MAX = 1024 * 1024
MODELS_MAX = 1024
"""The first known go first."""
HASHES_MAX = 8
"""Of models with the same weights and layout (another tokenizer or template)."""

log = structlog.get_logger(__name__)


_MODEL_HASH = re.compile(r"[0-9a-f]{64}")


def is_model_hash(text: str) -> bool:
    """Whether it is a hash of a model (``subjects.ids.ModelHash``)."""
    return _MODEL_HASH.fullmatch(text) is not None


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """One model's weights in one layout."""

    weights_hash: str
    signature: KvSignature
    model_hashes: tuple[str, ...] = ()
    codec: str = "none"


class KnownModels:
    """By weights and layout."""

    def __init__(self, directory: Path | None) -> None:
        """``directory`` is where the file is, or None: nothing is kept."""
        self._path = directory / FILE if directory is not None else None
        self._known: dict[tuple[str, KvSignature], Known] = {}
        if self._path is None:
            return
        with suppress(OSError):
            # Without O_NONBLOCK the opening of a pipe would wait for somebody who writes to it.
            with open(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                data = file.read(FILE_BYTES_MAX) or b""
            try:
                for one in decode(data, list[Known]):
                    self._known[one.weights_hash, one.signature] = one
            except DecodeError as error:
                log.warning("the list of known models is unreadable and begun anew", error=str(error))

    def keep_nowhere(self) -> None:
        """The directory is none of ours."""
        self._path = None

    def note(self, weights_hash: str, signature: KvSignature, model_hash: str, codec: str) -> bool:
        """Whether that was news."""
        key = (weights_hash, signature)
        before = self._known.get(key)
        hashes = before.model_hashes if before is not None else ()
        if is_model_hash(model_hash) and model_hash not in hashes:
            hashes = (*hashes, model_hash)[-HASHES_MAX:]
        after = Known(weights_hash=weights_hash, signature=signature, model_hashes=hashes, codec=codec)
        if after == before:
            return False
        self._known[key] = after
        if len(self._known) > MODELS_MAX:
            del self._known[next(iter(self._known))]
        self._save()
        return True

    def of(self, identity: KvIdentity) -> Known | None:
        """What is known of these weights in this layout."""
        return self._known.get((identity.weights_hash, identity.signature))

    def hashes(self, identity: KvIdentity) -> tuple[ModelHash, ...]:
        """Hashes of the models that have these weights in this layout."""
        known = self.of(identity)
        return tuple(ModelHash(one) for one in known.model_hashes) if known is not None else ()

    def layouts(self, weights_hash: str) -> list[KvSignature]:
        """In which layouts these weights are known, the first that came first."""
        return [signature for weights, signature in self._known if weights == weights_hash]

    def by_signature(self) -> dict[str, tuple[str, ...]]:
        """Model hashes by ``KvSignature.model``."""
        found: dict[str, tuple[str, ...]] = {}
        for known in self._known.values():
            found[known.signature.model] = (*found.get(known.signature.model, ()), *known.model_hashes)
        return found

    def _save(self) -> None:
        if self._path is None:
            return
        # Some hundred bytes a model, written when a new model comes: not worth a thread.
        with suppress(OSError):
            new = self._path.with_suffix(".new")
            new.write_bytes(encode(list(self._known.values())))
            os.replace(new, self._path)
