"""How the KV of a block is written when it leaves the host tier for the disk (KVC-5).

- ``none``      the engine's bytes, unchanged and without a header, so that pages can be written from where they lie
- ``lossless``  the same bytes back: byte planes apart, then zstd
- ``fp8``       e4m3 with one scale per layer, head and kind (keys, values), then zstd where that pays
- ``int4``      about four bits per value: codes in groups with a step and an offset, then zstd's entropy coder

A payload says what it is (version, codec, groups, hash of the signature, checksum); whatever does not fit the signature is
refused, and no size that a payload claims is believed. No torch in here: the node runs it.

``int4``: keys are grouped per channel over the block's tokens, values per token over the head, since keys have channels that
are large at every token and values have not (Liu et al., "KIVI", arXiv 2402.02750; Hooper et al., "KVQuant", arXiv
2401.18079). Codes go through an entropy coder, so a group may have as many levels as its step asks for: a uniform step
followed by entropy coding is within 1.53 dB of the rate-distortion bound (Gish and Pierce, 1968), where codes of fixed width
with their range stretched to the group's extremes pay more. That frees the choice of the step: keys take one step for all
channels of a head, because an error counts by the query that meets it and not by the size of the channel that carries it,
and values one step per token. The levels were picked by measurement (``ops/bench/kv_codecs.py``, decisions 0031).
"""

from __future__ import annotations

import hashlib
import struct
import threading
from functools import lru_cache

import msgspec
import numpy as np
import xxhash
import zstandard

from kvcache.codec import numbers
from kvcache.codec.numbers import Array, Buffer
from kvcache.core.identity import KvSignature
from subjects.errors import CarpoolError

CODECS = ("none", "lossless", "fp8", "int4")
"""Names for ``ModelRecord.kv_codec``."""
VERSION = 1

_MAGIC = b"CKVB"
_HEADER = struct.Struct("<4sBBB2BI8sQ")  # magic, version, codec, 0, groups, bytes after, signature, checksum
_SECTION = struct.Struct("<BI")  # 0: as it is, 1: zstd; bytes
_PAYS = 0.98  # zstd is kept where it leaves less than this
_ZSTD_LEVEL = 1  # codes have no repetitions to be found: its entropy coder does all there is to do
_KEY_GROUP_MAX, _VALUE_GROUP_MAX = 32, 64
_CODE_MAX = 255
_OFFSET_MAX = 16_384
"""Offsets are counted in steps and have 16 bits; a step is no less than a group's largest value over this."""
_FINITE_MAX = 1e36
_OCTAVE = 8
_EXPONENT_MIN = -120 * _OCTAVE
_STREAMS = 17
"""Groups of about equally many levels share a stream, half an octave apart, and with it the entropy coder's table."""


class CodecError(CarpoolError):
    """A payload that is not of this codec, signature or version, or is corrupt; or an unknown codec."""


class Levels(msgspec.Struct, frozen=True):
    """The parameters of ``int4``: more levels, more bits, less error.

    A step is a range over ``levels - 1``: for values the group's own range, for keys the median of the ranges of a head's
    channels (``even_keys``) or the channel's own.
    """

    keys: int = 20
    values: int = 20
    even_keys: bool = True


SHIPPED = Levels()


def encode(signature: KvSignature, block: Buffer, codec: str) -> bytes:
    """The payload of one block of ``signature.block_bytes`` bytes.

    Blocks with values that are no finite numbers, or in a precision that is not known, are kept without loss by every codec.

    Raises:
        CodecError: unknown codec, or the block has another size than the signature says.
    """
    _check_codec(codec)
    if memoryview(block).nbytes != signature.block_bytes:
        raise CodecError(f"a block of {memoryview(block).nbytes} bytes, expected {signature.block_bytes}")
    if codec == "none":
        return bytes(block)
    if codec == "int4" and _known(signature):
        return encode_grouped(signature, block, SHIPPED)
    if codec == "fp8" and _known(signature) and signature.dtype in numbers.WIDE:
        body = _encode_fp8(signature, block)
        if body is not None:
            return _payload(signature, "fp8", body)
    return _encode_lossless(signature, block)


def encode_grouped(signature: KvSignature, block: Buffer, levels: Levels) -> bytes:
    """As :func:`encode` with ``int4``, with other parameters; ``decode`` reads it like any other."""
    body = b""
    for part in numbers.parts(signature, numbers.raw(block, signature.dtype)):
        values = numbers.widen(part.read(), signature.dtype)
        count = levels.keys if part.is_keys else levels.values
        encoded = _encode_rows(values, _group(values.shape, not part.is_keys), count, part.is_keys and levels.even_keys)
        if encoded is None:
            return _encode_lossless(signature, block)
        body += encoded
    return _payload(signature, "int4", body)


def decode(signature: KvSignature, payload: Buffer, codec: str, into: memoryview) -> None:
    """Writes the block into ``into``, writable and of ``signature.block_bytes`` bytes.

    Raises:
        CodecError: the payload is corrupt, of another codec, version or signature; ``into`` may then hold anything.
    """
    _check_codec(codec)
    if into.nbytes != signature.block_bytes:
        raise CodecError(f"room for {into.nbytes} bytes, expected {signature.block_bytes}")
    if codec == "none":
        if memoryview(payload).nbytes != signature.block_bytes:
            raise CodecError(f"a block of {memoryview(payload).nbytes} bytes, expected {signature.block_bytes}")
        into.cast("B")[:] = memoryview(payload).cast("B")
        return
    way, body = _open(signature, payload)
    if way not in ("lossless", codec):
        raise CodecError(f"a payload of codec {way}, expected {codec}")
    if way == "lossless":
        _decode_lossless(body, into)
    elif not _known(signature):
        raise CodecError(f"numbers of precision {signature.dtype[:40]!r} are not known")
    else:
        elements = numbers.raw(into, signature.dtype)
        for part in numbers.parts(signature, elements):
            values = _decode_fp8(body, part) if way == "fp8" else _decode_rows(body, part.shape, not part.is_keys)
            part.write(numbers.narrow(np.ascontiguousarray(values), signature.dtype))
    body.end()


@lru_cache(maxsize=64)
def payload_bytes_max(signature: KvSignature, codec: str) -> int:
    """No payload of a block is longer; readers refuse what claims to be.

    Raises:
        CodecError: unknown codec.
    """
    _check_codec(codec)
    if codec == "none":
        return signature.block_bytes
    # Codes have one byte for each element of two or four; steps, offsets and streams add less than twice a row's count,
    # and what grows is kept without loss instead. Planes that do not shrink are kept as they are.
    return 2 * signature.block_bytes + _HEADER.size + 64 * _SECTION.size


def _check_codec(codec: str) -> None:
    if codec not in CODECS:
        raise CodecError(f"no codec {codec[:40]!r}; there are {', '.join(CODECS)}")


# -------------------------------------------------------------------------------------------------------------- lossless


def _known(signature: KvSignature) -> bool:
    """Whether the block can be read as numbers."""
    return signature.dtype in numbers.RAW and signature.block_bytes % np.dtype(numbers.RAW[signature.dtype]).itemsize == 0


def _width(signature: KvSignature) -> int:
    """Bytes of an element; 1 where that is not known."""
    return np.dtype(numbers.RAW[signature.dtype]).itemsize if _known(signature) else 1


def _encode_lossless(signature: KvSignature, block: Buffer) -> bytes:
    data = np.frombuffer(block, np.uint8)
    width = _width(signature)
    planes = (_section(data[index::width].tobytes()) for index in range(width))
    return _payload(signature, "lossless", b"".join(planes))


def _decode_lossless(body: _Body, into: memoryview) -> None:
    width = _width(body.signature)
    target = np.frombuffer(into, np.uint8)
    for index in range(width):
        target[index::width] = body.bytes_of(target[index::width].size)


# ------------------------------------------------------------------------------------------------------------------ fp8


def _encode_fp8(signature: KvSignature, block: Buffer) -> bytes | None:
    """Scales and codes of each part; None where a value is no finite number."""
    body = b""
    for part in numbers.parts(signature, numbers.raw(block, signature.dtype)):
        values = numbers.widen(part.read(), signature.dtype)
        largest = np.abs(values).max(axis=(1, 2), keepdims=True)
        if not largest.max() < _FINITE_MAX:
            return None
        scales = np.maximum(largest / np.float32(numbers.E4M3_MAX), np.float32(2.0**-100))
        body += _section(scales.astype("<f4").tobytes()) + _section(numbers.to_e4m3(values / scales).tobytes())
    return body


def _decode_fp8(body: _Body, part: numbers.Part) -> Array:
    heads, rows, row = part.shape
    scales = body.bytes_of(4 * heads).view("<f4").reshape(heads, 1, 1)
    if not np.all(np.isfinite(scales)):
        raise CodecError("a scale is no finite number")
    values: Array = numbers.widen(body.bytes_of(heads * rows * row), "fp8_e4m3").reshape(part.shape)
    with np.errstate(over="ignore"):  # A payload that lies may name a scale that no value survives.
        values *= scales
    return values


# ----------------------------------------------------------------------------------------------------------------- int4


def _group(shape: tuple[int, ...], along_channels: bool) -> int:
    """Elements of a group: the largest divisor of a row up to the bound."""
    most = _VALUE_GROUP_MAX if along_channels else _KEY_GROUP_MAX
    return next(size for size in range(min(most, shape[2]), 0, -1) if shape[2] % size == 0)


def _step_sizes(exponents: Array) -> Array:
    """``2 ** (exponent / 8)``, to the bit the same on every machine."""
    fractions = np.array(_FRACTIONS, np.float32)
    steps: Array = np.ldexp(fractions[exponents % _OCTAVE], exponents // _OCTAVE)
    return steps


_FRACTIONS = tuple(round(2.0 ** (index / _OCTAVE) * 2**20) / 2**20 for index in range(_OCTAVE))


def _fold(two: np.ufunc, groups: Array) -> Array:
    """``two.reduce`` over the last axis, which numpy does slowly where that axis is short."""
    while groups.shape[-1] % 2 == 0:
        half = groups.shape[-1] // 2
        groups = two(groups[..., :half], groups[..., half:])
    folded: Array = two.reduce(groups, axis=-1)
    return folded


def _encode_rows(values: Array, group: int, levels: int, even: bool) -> bytes | None:
    """Steps, offsets, stream numbers and codes of ``[heads, rows, elements]``; None where a value is no finite number.

    A group's elements are ``(code + offset) * step``, so each is off by half a step at most.
    """
    heads = values.shape[0]
    groups = values.reshape(heads, -1, group)
    low, high = _fold(np.minimum, groups), _fold(np.maximum, groups)
    largest = np.maximum(np.abs(low), np.abs(high))
    if not largest.max() < _FINITE_MAX:  # also when it is not a number
        return None
    ranges = high - low
    wanted = np.median(ranges, axis=1, keepdims=True) if even else ranges
    # As many levels as fit a code and offsets that fit their bits, whatever was wanted; one octave of room for rounding.
    least = np.maximum(ranges / np.float32(_CODE_MAX - 2), largest / np.float32(_OFFSET_MAX))
    tiny = np.float32(2.0 ** (_EXPONENT_MIN // _OCTAVE))
    exponents = np.maximum(
        np.rint(np.log2(np.maximum(wanted / np.float32(levels - 1), tiny)) * _OCTAVE),
        np.ceil(np.log2(np.maximum(least, tiny)) * _OCTAVE + 0.01),
    ).astype(np.int16)
    steps = _step_sizes(exponents.astype(np.int32))[..., None]
    counts = groups / steps
    np.rint(counts, out=counts)
    offsets = np.rint(low[..., None] / steps)
    counts -= offsets
    codes = counts.astype(np.uint8)
    most = np.rint(high[..., None] / steps) - offsets
    streams = np.ceil(2 * np.log2(most + 1)).astype(np.uint8)
    body = [
        _planes(exponents),
        _planes(offsets.astype(np.int16)),
        _section(streams.tobytes()),
    ]
    flat, of_stream = codes.reshape(-1, group), streams.reshape(-1)
    body += [_section(flat[of_stream == stream].tobytes()) for stream in range(1, _STREAMS) if np.any(of_stream == stream)]
    return b"".join(body)


def _decode_rows(body: _Body, shape: tuple[int, int, int], along_channels: bool) -> Array:
    heads, rows, row = shape
    group = _group(shape, along_channels)
    count = heads * rows * (row // group)
    exponents = body.integers(count).astype(np.int32)
    if exponents.min() < _EXPONENT_MIN - 1 or exponents.max() > -_EXPONENT_MIN + _OCTAVE:
        raise CodecError("a step is out of bounds")
    offsets = body.integers(count).astype(np.float32)
    streams = body.bytes_of(count)
    if streams.max() >= _STREAMS:
        raise CodecError("there is no such stream")
    values = np.zeros((count, group), np.float32)
    for stream in range(1, _STREAMS):
        chosen = np.flatnonzero(streams == stream)
        if chosen.size:
            values[chosen] = body.bytes_of(chosen.size * group).reshape(-1, group)
    values += offsets[:, None]
    values *= _step_sizes(exponents)[:, None]
    return values.reshape(shape)


# -------------------------------------------------------------------------------------------------------------- payload


@lru_cache(maxsize=256)
def _fingerprint(signature: KvSignature) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(signature), digest_size=8).digest()


class _Zstd(threading.local):
    """Contexts of zstd, which one thread at a time may use."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def _section(data: bytes) -> bytes:
    """Bytes with their length, through zstd where that pays."""
    squeezed = _zstd.compressor.compress(data)
    if len(squeezed) < _PAYS * len(data):
        return _SECTION.pack(1, len(squeezed)) + squeezed
    return _SECTION.pack(0, len(data)) + data


def _planes(values: Array) -> bytes:
    """16-bit integers, low bytes and high bytes apart."""
    planes = values.astype("<i2").reshape(-1).view(np.uint8).reshape(-1, 2)
    return _section(planes[:, 0].tobytes()) + _section(planes[:, 1].tobytes())


def _payload(signature: KvSignature, codec: str, body: bytes) -> bytes:
    header = _HEADER.pack(
        _MAGIC,
        VERSION,
        CODECS.index(codec),
        0,
        _KEY_GROUP_MAX,
        _VALUE_GROUP_MAX,
        len(body),
        _fingerprint(signature),
        xxhash.xxh3_64_intdigest(body),
    )
    return header + body


def _open(signature: KvSignature, payload: Buffer) -> tuple[str, _Body]:
    """Codec, and what follows the header, checked."""
    data = memoryview(payload).cast("B")
    if len(data) < _HEADER.size:
        raise CodecError("the payload is cut short")
    magic, version, way, none, key_group, value_group, size, fingerprint, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC or way >= len(CODECS) or none:
        raise CodecError("these bytes are no payload of a codec")
    if version != VERSION or (key_group, value_group) != (_KEY_GROUP_MAX, _VALUE_GROUP_MAX):
        raise CodecError(f"a payload of version {version}, expected {VERSION}")
    if fingerprint != _fingerprint(signature):
        raise CodecError("the payload is of another model, precision or layout")
    body = data[_HEADER.size :]
    if size != len(body):
        raise CodecError(f"a payload of {len(body)} bytes that says {size}")
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise CodecError("the payload is corrupt: its checksum is another")
    return CODECS[way], _Body(signature, body)


class _Body:
    """Reads sections in order; the reader says how long each is."""

    def __init__(self, signature: KvSignature, data: memoryview) -> None:
        self.signature = signature
        self._data = data

    def bytes_of(self, size: int) -> Array:
        """The next section, which must have ``size`` bytes once it is expanded."""
        if len(self._data) < _SECTION.size:
            raise CodecError("a section is missing")
        way, stored = _SECTION.unpack_from(self._data)
        data = self._data[_SECTION.size : _SECTION.size + stored]
        if len(data) != stored or way > 1:
            raise CodecError("a section is cut short")
        self._data = self._data[_SECTION.size + stored :]
        if way == 0:
            if stored != size:
                raise CodecError(f"a section of {stored} bytes, expected {size}")
            return np.frombuffer(data, np.uint8)
        try:
            # What a frame says of its size would be allocated: it is compared before.
            if zstandard.get_frame_parameters(data).content_size != size:
                raise CodecError(f"a section of another size, expected {size}")
            return np.frombuffer(_zstd.decompressor.decompress(data, max_output_size=size), np.uint8)
        except zstandard.ZstdError as error:
            raise CodecError(f"a section cannot be expanded: {error}") from None

    def integers(self, count: int) -> Array:
        """The next two sections as 16-bit integers."""
        planes = np.empty((count, 2), np.uint8)
        planes[:, 0] = self.bytes_of(count)
        planes[:, 1] = self.bytes_of(count)
        return planes.reshape(-1).view("<i2")

    def end(self) -> None:
        """Nothing may follow."""
        if len(self._data):
            raise CodecError("bytes follow the last section")
