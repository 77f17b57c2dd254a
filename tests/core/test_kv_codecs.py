"""Codecs of KV blocks and the precision adapter: what comes back, how far off, and what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.codec import codecs, numbers
from kvcache.codec.codecs import CODECS, CodecError, Levels, decode, encode, encode_grouped, payload_bytes_max
from kvcache.codec.precision import convert, convertible, convertible_from
from kvcache.core.identity import KvIdentity, KvSignature
from profiles.capacity import Shape, kv_signature

FORMS = (
    "layer,head,k:dim.token,v:token.dim",
    "layer,head,kv:vec16",
    "layer,head,kv:amx",
    "layer,head,token,kv@FLASH_ATTN",
    "layer,kv,token,head,dim@FLASHINFER",
    "layer,kv,head,token,dim;0/2",
    "layer,head,kv:other",
)
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1}
SHAPE = Shape(layers=2, kv_heads=2, head_dim=32, max_context_len=512)


def signature_of(dtype: str = "bfloat16", form: str = FORMS[0], block_size: int = 32) -> KvSignature:
    elements = 2 * 2 * 2 * 32 * block_size
    name = "fp8" if dtype == "fp8_e4m3" else dtype
    return KvSignature(
        model=kv_signature(SHAPE, name, "ab" * 32, {"rope_theta": 1e5}, block_size),
        layers=2,
        kv_heads=2,
        head_size=32,
        dtype=dtype,
        form=form,
        block_size=block_size,
        block_bytes=SIZES[dtype] * elements,
    )


def taking(source: KvSignature) -> KvSignature:
    """The fp8 variant of it that takes its blocks."""
    fp8 = signature_of("fp8_e4m3", source.form, source.block_size)
    return msgspec.structs.replace(fp8, model=f"{fp8.model}-converted")


def block_of(signature: KvSignature, seed: int, spread: float = 1.0) -> bytes:
    """Normal values; every fourth element is larger by ``spread``."""
    random = np.random.Generator(np.random.PCG64(seed))
    values = random.normal(size=signature.block_bytes // SIZES[signature.dtype]).astype(np.float32)
    values[::4] *= np.float32(spread)
    return numbers.narrow(values, signature.dtype).tobytes()


def there_and_back(signature: KvSignature, block: bytes, codec: str) -> bytes:
    payload = encode(signature, block, codec)
    assert len(payload) <= payload_bytes_max(signature, codec)
    room = bytearray(b"\x55" * len(block))
    decode(signature, payload, codec, memoryview(room))
    return bytes(room)


def wide(signature: KvSignature, block: bytes) -> numbers.Array:
    return numbers.widen(numbers.raw(block, signature.dtype), signature.dtype).astype(np.float64)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_a_part_is_a_channel_of_keys_or_a_token_of_values(form: str) -> None:
    """KVC-5: each form's keys and values are found where the engine keeps them, and together are the block, once."""
    signature = signature_of("float32", form)
    elements = np.arange(signature.block_bytes // 4, dtype=np.float32)
    parts = numbers.parts(signature, elements)
    seen = np.concatenate([part.read().reshape(-1) for part in parts])
    assert sorted(seen.tolist()) == elements.tolist()
    if len(parts) == 2:
        assert [(part.is_keys, part.shape) for part in parts] == [(True, (4, 32, 32)), (False, (4, 32, 32))]
    copy = np.zeros_like(elements)
    for part, target in zip(parts, numbers.parts(signature, copy), strict=True):
        target.write(part.read())
    assert copy.tolist() == elements.tolist()


def test_all_forms_hold_the_same_keys_and_values() -> None:
    """P2: the same numbers in another form have the same payload sections, since they are read as keys and values."""
    first = numbers.parts(signature_of("float32"), np.arange(8192, dtype=np.float32))
    for form in FORMS[1:-1]:
        elements = np.zeros(8192, np.float32)
        parts = numbers.parts(signature_of("float32", form), elements)
        for ours, theirs in zip(first, parts, strict=True):
            theirs.write(ours.read())
        again = numbers.parts(signature_of("float32", form), elements)
        assert [part.read().tolist() for part in again] == [part.read().tolist() for part in first]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", SIZES)
def test_none_and_lossless_give_the_same_bytes(dtype: str, form: str) -> None:
    """KVC-5: these two change nothing, whatever the bytes mean."""
    signature = signature_of(dtype, form)
    block = np.random.Generator(np.random.PCG64(5)).integers(0, 256, signature.block_bytes, np.uint8).tobytes()
    assert encode(signature, block, "none") == block
    assert there_and_back(signature, block, "none") == block
    assert there_and_back(signature, block, "lossless") == block


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(sorted(SIZES)),
    st.sampled_from(FORMS),
    st.sampled_from((16, 32, 48)),
    st.sampled_from((0.0, 1e-6, 1.0, 40.0)),
)
def test_4_bit_is_off_by_half_a_step_at_most(seed: int, dtype: str, form: str, block_size: int, spread: float) -> None:
    """KVC-5: no value is further off than half of the widest step a group may ask for, and rounding to its precision."""
    signature = signature_of(dtype, form, block_size)
    block = block_of(signature, seed, spread)
    before, after = wide(signature, block), wide(signature, there_and_back(signature, block, "int4"))
    for part, other in zip(numbers.parts(signature, before), numbers.parts(signature, after), strict=True):
        # A head's widest range bounds its steps; 2 ** (1 / 8) more where the step was rounded up.
        values = part.read()
        groups = values.reshape(len(values), -1)
        widest = groups.max(axis=1) - groups.min(axis=1)
        step = np.maximum(widest / 19, np.abs(groups).max(axis=1) / 16_000) * 2 ** (1 / 8)
        precision = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-8, "fp8_e4m3": 2**-4}[dtype]
        bound = step / 2 + np.abs(groups).max(axis=1) * precision + 2**-9 * (dtype == "fp8_e4m3")
        off = np.abs(values - other.read()).reshape(len(values), -1).max(axis=1)
        assert np.all(off <= bound)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(numbers.WIDE), st.sampled_from(FORMS), st.sampled_from((1e-6, 1.0, 40.0)))
def test_fp8_is_off_by_a_sixteenth_at_most(seed: int, dtype: str, form: str, spread: float) -> None:
    """KVC-5: three bits of mantissa; below the smallest normal number of a head half a step of its subnormals, and
    what rounding to bfloat16 adds to that, a 32nd."""
    signature = signature_of(dtype, form)
    block = block_of(signature, seed, spread)
    before, after = wide(signature, block), wide(signature, there_and_back(signature, block, "fp8"))
    for part, other in zip(numbers.parts(signature, before), numbers.parts(signature, after), strict=True):
        values = part.read()
        scale = np.abs(values).max(axis=(1, 2), keepdims=True) / 448
        assert np.all(np.abs(values - other.read()) <= np.maximum(np.abs(values) / 15.5, scale * 2**-10 * 1.04))


def test_real_looking_blocks_shrink() -> None:
    """KVC-5: normal values in bfloat16: fp8 leaves under half, 4 bits under 30 %, and no loss under 75 %."""
    signature = msgspec.structs.replace(signature_of(), layers=30, block_bytes=15 * signature_of().block_bytes)
    block = block_of(signature, 1)
    shares = {codec: len(encode(signature, block, codec)) / len(block) for codec in CODECS}
    assert shares["none"] == 1
    assert shares["int4"] < 0.3 < shares["fp8"] < 0.5 < shares["lossless"] < 0.75


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", ["fp8", "int4"])
def test_what_is_no_finite_number_is_kept_without_loss(codec: str, bad: float) -> None:
    """KVC-5: a codec neither hides nor spreads a NaN or an infinity."""
    signature = signature_of("float32")
    values = wide(signature, block_of(signature, 3)).astype(np.float32)
    values[77] = bad
    assert there_and_back(signature, values.tobytes(), codec) == values.tobytes()


@pytest.mark.parametrize("codec", ["lossless", "fp8", "int4"])
def test_numbers_that_are_not_known_are_kept_without_loss(codec: str) -> None:
    """P2: a precision that nobody taught us, or a size that is no number of elements, is bytes and stays those bytes."""
    for change in ({"dtype": "fp8_e5m2"}, {"block_bytes": signature_of().block_bytes - 1}):
        signature = msgspec.structs.replace(signature_of(), **change)
        block = bytes(range(256)) * 64
        block = block[: signature.block_bytes]
        assert there_and_back(signature, block, codec) == block


@pytest.mark.parametrize("codec", ["fp8", "int4"])
def test_zeros_constants_and_outliers(codec: str) -> None:
    """KVC-5: a block of zeros stays one, a constant one nearly so, and one outlier costs only its own group."""
    signature = signature_of("float16")
    zeros = bytes(signature.block_bytes)
    assert there_and_back(signature, zeros, codec) == zeros
    same = np.full(signature.block_bytes // 2, 1.5, np.float16).tobytes()
    assert np.allclose(wide(signature, there_and_back(signature, same, codec)), 1.5, rtol=0.001)
    values = np.frombuffer(block_of(signature, 2), np.float16).copy()
    values[0] = 60_000
    off = np.abs(wide(signature, there_and_back(signature, values.tobytes(), codec)) - values)
    # The outlier lies in the first channel of the first head; of 8-bit floats one scale is a head's.
    assert off[32 if codec == "int4" else 1024 :].max() < 0.4
    assert off[0] < 3000


def test_4_bit_with_other_levels_is_read_alike() -> None:
    """KVC-5: more levels, less error and more bytes; the payload alone says how it was grouped."""
    signature = signature_of()
    block = block_of(signature, 4)
    seen = []
    for levels in (Levels(8, 8), Levels(16, 16), Levels(64, 64), Levels(64, 64, even_keys=False)):
        payload = encode_grouped(signature, block, levels)
        room = bytearray(len(block))
        decode(signature, payload, "int4", memoryview(room))
        seen.append((np.abs(wide(signature, bytes(room)) - wide(signature, block)).mean(), len(payload)))
    errors, sizes = [error for error, _ in seen], [size for _, size in seen]
    assert errors[0] > errors[1] > errors[2] and errors[3] < errors[1]
    assert sizes[0] < sizes[1] < sizes[2]


# -------------------------------------------------------------------------------------------------------------- refusals


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(("lossless", "fp8", "int4")), st.data())
def test_a_flipped_bit_or_a_cut_is_refused(codec: str, data: st.DataObject) -> None:
    """P2: corrupt payloads raise, and nothing else: no wrong block, no other error."""
    signature = signature_of()
    payload = bytearray(encode(signature, block_of(signature, 9), codec))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, 8 * len(payload) - 1))
        payload[place // 8] ^= 1 << place % 8
    else:
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    with pytest.raises(CodecError):
        decode(signature, payload, codec, memoryview(bytearray(signature.block_bytes)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(("lossless", "fp8", "int4")), st.binary(max_size=300), st.integers(0, 400))
def test_sections_that_lie_are_refused(codec: str, lie: bytes, place: int) -> None:
    """P2: with a right checksum over wrong sections too, decoding ends in a block or in a CodecError."""
    signature = signature_of()
    body = bytearray(encode(signature, block_of(signature, 9), codec)[codecs._HEADER.size :])
    body[place : place + len(lie)] = lie
    payload = codecs._payload(signature, codec, bytes(body))
    try:
        decode(signature, payload, codec, memoryview(bytearray(signature.block_bytes)))
    except CodecError as error:
        assert str(error)


def test_a_frame_that_claims_gigabytes_is_refused_before_it_is_expanded() -> None:
    """P2: what a frame says of its size is compared, never allocated."""
    signature = signature_of()
    huge = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    huge[5:9] = (0xFFFF_FFFF).to_bytes(4, "little")
    section = codecs._SECTION.pack(1, len(huge)) + bytes(huge)
    with pytest.raises(CodecError):
        decode(
            signature,
            codecs._payload(signature, "lossless", section),
            "lossless",
            memoryview(bytearray(signature.block_bytes)),
        )


def test_another_signature_codec_or_version_is_refused() -> None:
    """P2, KVC-1: a payload serves the model, precision and layout that it was written for, and no other."""
    signature = signature_of()
    payload = encode(signature, block_of(signature, 1), "int4")
    room = memoryview(bytearray(signature.block_bytes))
    for change in ({"model": "other"}, {"form": FORMS[2]}, {"dtype": "float16"}):
        with pytest.raises(CodecError, match="another model, precision or layout"):
            decode(msgspec.structs.replace(signature, **change), payload, "int4", room)
    with pytest.raises(CodecError, match="of codec int4, expected fp8"):
        decode(signature, payload, "fp8", room)
    with pytest.raises(CodecError, match="version 2"):
        decode(signature, payload[:4] + b"\x02" + payload[5:], "int4", room)
    with pytest.raises(CodecError, match="room for"):
        decode(signature, payload, "int4", room[:-2])
    with pytest.raises(CodecError, match="a block of 10 bytes"):
        encode(signature, bytes(10), "int4")
    with pytest.raises(CodecError, match="there are none, lossless, fp8, int4"):
        encode(signature, bytes(signature.block_bytes), "int3")


# ------------------------------------------------------------------------------------------------------------- precision


def test_e4m3_rounds_to_the_nearest_ties_to_even_and_saturates() -> None:
    """KVC-5: every one of the 65,536 bfloat16 values has the nearest byte, by looking at all bytes."""
    values = numbers.widen(np.arange(65_536, dtype=np.uint16), "bfloat16")
    values = values[np.isfinite(values)].astype(np.float64)
    known = numbers.e4m3_values().astype(np.float64)
    finite = known[np.isfinite(known)]
    got = known[numbers.to_e4m3(values.astype(np.float32))]
    order = np.sort(np.unique(finite))
    clipped = np.clip(values, -448, 448)
    above = order[np.clip(np.searchsorted(order, clipped), 0, len(order) - 1)]
    below = order[np.clip(np.searchsorted(order, clipped, side="right") - 1, 0, len(order) - 1)]
    assert np.array_equal(np.abs(got - clipped), np.minimum(np.abs(above - clipped), np.abs(below - clipped)))
    samples = np.array([1.0625, 1.1875, 17.0, 19.0, 464, 1e9, 2**-10, 3 * 2**-10, 1.0625 + 2**-20], np.float32)
    assert known[numbers.to_e4m3(samples)].tolist() == [1.0, 1.25, 16.0, 20.0, 448, 448, 0, 2**-8, 1.125]
    assert numbers.to_e4m3(np.array([np.nan], np.float32)).tolist() == [0x7F]


@pytest.mark.parametrize("codec", ["lossless", "fp8", "int4"])
def test_no_bit_of_the_header_may_flip(codec: str) -> None:
    """P2: also not the one that says how keys were grouped, which fits the sizes either way."""
    signature = signature_of()
    payload = encode(signature, block_of(signature, 9), codec)
    room = memoryview(bytearray(signature.block_bytes))
    for bit in range(8 * codecs._HEADER.size):
        wrong = bytearray(payload)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError):
            decode(signature, wrong, codec, room)


@pytest.mark.parametrize("dtype", numbers.WIDE)
def test_wide_blocks_serve_the_fp8_variant(dtype: str) -> None:
    """KVC-5: the block becomes what an engine with an fp8 cache would hold: each value in e4m3, at its place."""
    source = signature_of(dtype)
    target = taking(source)
    block, room = block_of(source, 6), bytearray(target.block_bytes)
    assert convertible(source, target)
    convert(source, block, target, memoryview(room))
    assert bytes(room) == numbers.to_e4m3(wide(source, block).astype(np.float32)).tobytes()
    convert(source, block, target, memoryview(room), scale=2.0)
    assert bytes(room) == numbers.to_e4m3(wide(source, block).astype(np.float32) / 2).tobytes()


def test_only_the_same_weights_in_the_other_precision_convert() -> None:
    """P2: not back from fp8, not another model's, layout's or tenant's, not for one that asks for none."""
    source = signature_of()
    target = taking(source)
    plain = signature_of("fp8_e4m3")
    assert convertible(source, target) and not convertible(source, plain) and not convertible(plain, target)
    assert not convertible(target, source)
    assert not convertible(source, source)
    other_weights = kv_signature(SHAPE, "fp8", "cd" * 32, {"rope_theta": 1e5}, 32) + "-converted"
    other_config = kv_signature(SHAPE, "fp8", "ab" * 32, {"rope_theta": 1e6}, 32) + "-converted"
    for change in (
        {"model": other_weights},
        {"model": other_config},
        {"model": source.model},
        {"model": "simulated-b32"},
        {"kv_heads": 1},
        {"form": FORMS[2]},
        {"block_bytes": target.block_bytes * 2},
    ):
        assert not convertible(source, msgspec.structs.replace(target, **change))
    packed = [msgspec.structs.replace(signature, form="layer,head,kv:amx") for signature in (source, target)]
    assert not convertible(*packed)
    coded = [msgspec.structs.replace(one, model=f"{one.model}-int4") for one in (source, target)]
    assert convertible(*coded) and not convertible(coded[0], target) and not convertible(source, coded[1])
    ours = KvIdentity(weights_hash="ab" * 32, signature=source, salt=b"a" * 16)
    theirs = KvIdentity(weights_hash="ab" * 32, signature=target, salt=b"a" * 16)
    assert convertible_from(ours, theirs)
    assert not convertible_from(ours, msgspec.structs.replace(theirs, salt=b"b" * 16))
    with pytest.raises(CodecError):
        convert(target, bytes(target.block_bytes), source, memoryview(bytearray(source.block_bytes)))
