"""What threads of a node do with its disk: blocks, pinned meanwhile, go to the store and come back, encoded or not."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

from kvcache.core.holdings import Held
from kvcache.core.identity import PAGE_BYTES, KvIdentity
from kvcache.node.host_tier import HostBlock, HostTier, checksums_of, decoded, encoded
from kvcache.store.store import KvStore, Refusal, StoredBlock, StoredForm

BATCH_BYTES = 16 * 1024 * 1024
"""Raw bytes that go to or come from disk at once."""

Use = tuple[KvIdentity, Sequence[bytes], float]
"""Blocks of one chain, and when they were used (wall clock)."""


class DiskThreads:
    """Called in threads; changes nothing but bytes of the blocks that it is given."""

    def __init__(self, store: KvStore) -> None:
        self._store = store

    def touch(self, uses: Sequence[Use]) -> None:
        """The store hears of uses, the earliest first."""
        for identity, hashes, at_s in uses:
            self._store.touch(identity, hashes, at_s)

    def look(self, identity: KvIdentity, hashes: Sequence[bytes]) -> list[tuple[bytes, StoredForm]]:
        """Parents and forms of the leading blocks that are there."""
        found: list[tuple[bytes, StoredForm]] = []
        for hash, form in zip(hashes, self._store.forms(identity, hashes), strict=False):
            parent = self._store.parent(identity, hash)
            if parent is None:
                break
            found.append((parent, form))
        return found

    def gone(self, blocks: Sequence[Held]) -> list[Held]:
        """Those of them that are not there."""
        return [held for held in blocks if not self._store.leading(held.identity, [held.hash])]

    def stored(self, identity: KvIdentity, hash: bytes) -> tuple[memoryview, str] | None:
        """A block's payload, verified, and its codec; None where it is not there (any more)."""
        forms = self._store.forms(identity, [hash])
        if not forms:
            return None
        scratch = memoryview(mmap.mmap(-1, forms[0].pages * PAGE_BYTES))
        read = self._store.get(identity, [hash], [[scratch]], time.time())
        return (scratch[: read[0].payload_bytes], read[0].codec) if read else None

    def read(
        self, host: HostTier, identity: KvIdentity, rooms: Sequence[HostBlock], forms: Sequence[StoredForm]
    ) -> list[bytes]:
        """The checksums of those leading blocks that were there and verified."""
        if all(form.codec == "none" for form in forms[: len(rooms)]):
            into = [host.rooms(block) for block in rooms]
            got = self._store.get(identity, [block.hash for block in rooms], into, time.time())
            whole = [form.codec == "none" and form.payload_bytes == identity.signature.block_bytes for form in got]
            return [checksums_of(block) for block, fits in zip(rooms, whole, strict=False) if fits] if all(whole) else []
        sums: list[bytes] = []
        for block in rooms:
            stored = self.stored(identity, block.hash)
            if stored is None:
                break
            if not decoded(block, *stored):
                break
            sums.append(checksums_of(block))
        return sums

    def put(
        self, identity: KvIdentity, batch: Sequence[HostBlock], codec: str
    ) -> tuple[int, Refusal | None, HostBlock | None]:
        """How many were kept, why not more, and the first that is no longer what it had been."""
        stored: list[StoredBlock] = []
        wrong: HostBlock | None = None
        for block in batch:
            if checksums_of(block) != block.checksums:
                wrong = block
                break
            payload = encoded(block, codec) if codec != "none" else None
            if payload is None:
                stored.append(StoredBlock(block.hash, block.parent, block.views))
            else:
                stored.append(StoredBlock(block.hash, block.parent, [memoryview(payload)], codec))
        if not stored:
            return 0, None, wrong
        result = self._store.put(identity, stored, time.time())
        return result.kept, result.refused, wrong


def one_batch(blocks: Sequence[HostBlock]) -> list[HostBlock]:
    """Blocks of the first one's identity, of together at most a batch's bytes."""
    if not blocks:
        return []
    identity_key = blocks[0].identity.key
    batch: list[HostBlock] = []
    total = 0
    for block in blocks:
        if block.identity.key != identity_key:
            continue
        total += block.size
        if batch and total > BATCH_BYTES:
            break
        batch.append(block)
    return batch
