"""The bytes of a ``.kvc`` file: what is read back is what was written, and nothing else is taken for a block."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.core.identity import PAGE_BYTES, KvIdentity
from kvcache.store.format import (
    DATA_OFFSET,
    ENTRY_BYTES,
    HEADER_BYTES,
    SEGMENT_BYTES_MAX,
    SLOTS_MAX,
    BlockEntry,
    FormatError,
    Header,
    decode_entries,
    decode_header,
    encode_entries,
    is_own_name,
    pack_checksums,
    page_offset,
    slots_of,
)
from tests.core.kv_store_world import identity, name, signature

HEADER = Header(identity=identity(), codec="fp8", serial=b"serial-1", created_s=1.5)


def entry(index: int, first_slot: int, pages: int, last_bytes: int = PAGE_BYTES) -> BlockEntry:
    return BlockEntry(
        hash=name(index),
        parent=name(index - 1) if index else b"",
        first_slot=first_slot,
        time_s=1_900_000_000 + index,
        payload_bytes=(pages - 1) * PAGE_BYTES + last_bytes,
        checksums=pack_checksums(range(index, index + pages)),
    )


def test_a_segment_is_sixty_mebibytes_of_pages_behind_one_page() -> None:
    """KVC-1: 64 KiB pages; the file is at most 60 MiB and one page, and what an opening reads at most 0.83 % of any file."""
    assert SEGMENT_BYTES_MAX == 60 * 2**20 + PAGE_BYTES
    worst = max((HEADER_BYTES + ENTRY_BYTES * slots) / page_offset(slots) for slots in range(1, SLOTS_MAX + 1))
    assert worst < 0.01 and (HEADER_BYTES + ENTRY_BYTES * SLOTS_MAX) / SEGMENT_BYTES_MAX < 0.0011


def test_a_header_says_all_of_the_identity() -> None:
    """KVC-1, P2: weights, whole signature, salt and codec come back as they were written."""
    assert decode_header(HEADER.encoded) == HEADER
    assert len(HEADER.encoded) == HEADER_BYTES and HEADER.file_name == b"serial-1".hex() + ".kvc"


def test_a_header_without_room_is_refused() -> None:
    """An identity that does not fit is an error when it is written, not a file that nobody can read."""
    long = KvIdentity(weights_hash="0" * 64, signature=signature("m" * 1000))
    with pytest.raises(ValueError, match="at most"):
        _ = Header(identity=long, codec="none", serial=bytes(8), created_s=0.0).encoded


@given(position=st.integers(0, HEADER_BYTES * 8 - 1))
@settings(max_examples=300, deadline=None)
def test_no_flipped_bit_of_a_header_goes_unseen(position: int) -> None:
    """A header with any one bit wrong is none."""
    data = bytearray(HEADER.encoded)
    data[position // 8] ^= 1 << position % 8
    with pytest.raises(FormatError):
        decode_header(bytes(data))


def test_kinds_of_files_that_are_no_segment() -> None:
    """Foreign, of another version, and damaged are told apart."""
    data = HEADER.encoded
    kinds = []
    for bad in (b"x" + data[1:], data[:8] + b"\x00\x00" + data[10:], data[:100] + b"\xff" + data[101:], data[:500]):
        with pytest.raises(FormatError) as caught:
            decode_header(bad)
        kinds.append(caught.value.kind)
    assert kinds == ["foreign", "version", "damaged", "damaged"]


def test_only_names_of_serials_are_ours() -> None:
    """Whatever else lies in the directory is never taken for a file that may be removed."""
    assert is_own_name("0123456789abcdef.kvc")
    assert [
        own for own in ("a.kvc", "0123456789abcdef", "0123456789ABCDEF.kvc", "0123456789abcdex.kvc") if is_own_name(own)
    ] == []


def test_blocks_come_back_whole() -> None:
    """Entries of several blocks with holes between them are read as those blocks."""
    blocks = [entry(0, 0, 3, 100), entry(1, 3, 1, 1), entry(2, 9, 4)]
    data = bytearray(ENTRY_BYTES * 13)
    for block in blocks:
        packed = encode_entries(HEADER, block)
        start = ENTRY_BYTES * block.first_slot
        data[start : start + len(packed)] = packed
    scan = decode_entries(HEADER, bytes(data), page_offset(13))
    assert (scan.blocks, scan.torn, scan.truncated) == (blocks, 0, 0)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    flips=st.lists(st.tuples(st.integers(0, 30), st.integers(0, ENTRY_BYTES * 8 - 1)), min_size=1, max_size=3, unique=True),
)
@settings(max_examples=200, deadline=None)
def test_a_damaged_entry_takes_its_block_and_no_other(sizes: list[int], flips: list[tuple[int, int]]) -> None:
    """A block with any bit of any of its entries wrong is not there; all others are, unchanged."""
    blocks: list[BlockEntry] = []
    slot = 0
    for index, pages in enumerate(sizes):
        blocks.append(entry(index, slot, pages, 1 + 100 * index))
        slot += pages
    whole = b"".join(encode_entries(HEADER, block) for block in blocks)
    data = bytearray(whole)
    for at, bit in flips:
        data[(at % slot) * ENTRY_BYTES + bit // 8] ^= 1 << bit % 8

    def intact(block: BlockEntry) -> bool:
        part = slice(block.first_slot * ENTRY_BYTES, (block.first_slot + block.pages) * ENTRY_BYTES)
        return data[part] == whole[part]

    scan = decode_entries(HEADER, bytes(data), page_offset(slot))
    assert scan.blocks == [block for block in blocks if intact(block)]
    assert (scan.torn > 0) == (data != whole) and scan.truncated == 0


def test_entries_of_another_segment_mean_nothing() -> None:
    """O3: an entry that was copied from another segment, of another tenant or the same one, is no entry here."""
    block = entry(0, 0, 2)
    for other in (
        Header(identity=identity(tenant="other"), codec="fp8", serial=b"serial-1", created_s=1.5),
        Header(identity=identity(), codec="fp8", serial=b"serial-2", created_s=1.5),
    ):
        scan = decode_entries(HEADER, encode_entries(other, block), page_offset(2))
        assert (scan.blocks, scan.torn) == ([], 2)


def test_parts_in_another_order_are_no_block() -> None:
    """Entries that are each intact make a block only in their order and without a gap."""
    packed = encode_entries(HEADER, entry(0, 0, 2))
    first, second = packed[:ENTRY_BYTES], packed[ENTRY_BYTES:]
    other = encode_entries(HEADER, entry(1, 0, 2))[ENTRY_BYTES:]
    for data in (second + first, first + bytes(ENTRY_BYTES) + second, first + other, first, first + first + first):
        assert decode_entries(HEADER, data, SEGMENT_BYTES_MAX).blocks == []


def test_a_block_past_the_end_of_its_file_is_left_out() -> None:
    """A truncated segment keeps the blocks whose payload it still has, to the byte."""
    blocks = [entry(0, 0, 2, 500), entry(1, 2, 2, 500)]
    data = b"".join(encode_entries(HEADER, block) for block in blocks)
    whole = page_offset(3) + 500
    assert decode_entries(HEADER, data, whole).blocks == blocks
    scan = decode_entries(HEADER, data, whole - 1)
    assert (scan.blocks, scan.truncated) == (blocks[:1], 1)


@given(data=st.binary(max_size=ENTRY_BYTES * 20), file_bytes=st.integers(0, SEGMENT_BYTES_MAX))
@settings(max_examples=100, deadline=None)
def test_noise_holds_no_block(data: bytes, file_bytes: int) -> None:
    """Arbitrary bytes are read without an error and without a block."""
    assert decode_entries(HEADER, data, file_bytes).blocks == []
    assert 0 <= slots_of(file_bytes) <= SLOTS_MAX and (file_bytes > DATA_OFFSET or slots_of(file_bytes) == 0)
