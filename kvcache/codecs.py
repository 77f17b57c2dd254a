"""How the KV of a block is written when it leaves the host tier for the disk (KVC-5).

- ``none``      the engine's bytes, unchanged and without a header, so that pages can be written from where they lie
- ``lossless``  the same bytes back: byte planes apart, then zstd
- ``fp8``       e4m3 with a scale per head's token (values) or channel (keys), then zstd where that pays
- ``int4``      4-bit codes in groups, keys grouped per channel over tokens and values per token, then zstd where that pays

A payload says what it is (version, codec, sizes, hash of the signature); whatever does not fit the signature is refused
before anything is allocated. No torch in here: the node runs it.
"""

from __future__ import annotations

from kvcache.core.identity import KvSignature
from subjects.errors import CarpoolError

CODECS = ("none", "lossless", "fp8", "int4")
"""Names for ``ModelRecord.kv_codec``."""


class CodecError(CarpoolError):
    """A payload that is not of this codec, signature or version, or is corrupt; or an unknown codec."""


def encode(signature: KvSignature, block: memoryview | bytes, codec: str) -> bytes:
    """The payload of one block of ``signature.block_bytes`` bytes.

    Raises:
        CodecError: unknown codec, or the block has another size than the signature says.
    """
    raise NotImplementedError


def decode(signature: KvSignature, payload: memoryview | bytes, codec: str, into: memoryview) -> None:
    """Writes the block into ``into``, writable and of ``signature.block_bytes`` bytes.

    Raises:
        CodecError: the payload is corrupt, of another codec, version or signature; ``into`` may then hold anything.
    """
    raise NotImplementedError


def payload_bytes_max(signature: KvSignature, codec: str) -> int:
    """No payload of a block is longer; readers refuse what claims to be."""
    raise NotImplementedError
