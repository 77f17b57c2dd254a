"""Blocks of one precision that may serve another of the same weights: float16/bfloat16/float32 for an fp8 KV cache.

``ModelRecord.kv_signature`` is ``<weights>-<config>-l<layers>-<heads>-<dtype>-b<block size>`` (``profiles.capacity``). The
fp8 variant of a model declares the same files and ``kv_cache_dtype: fp8``, so weights and configuration hash to the same and
the two signatures differ in the dtype alone. The other way round there is nothing to be had: what fp8 lost is lost.

A text whose beginning was converted may differ from one whose beginning the fp8 model computed, so a model takes such blocks
only if it says so (``spec.kv.converted``). Its signature then has ``-converted`` behind it: blocks that came this way are
never given to a model that did not ask for any.

Values are rounded to the nearest, as GPUs do. vLLM 0.32's CPU kernels cut the mantissa off instead, so their own fp8 blocks
differ in the last bit of about half the values; ours are the closer ones, at the same places (seen for ``vec``).
"""

from __future__ import annotations

import numpy as np

from kvcache.codec import numbers
from kvcache.codec.codecs import CodecError
from kvcache.codec.numbers import Buffer
from kvcache.core.identity import KvIdentity, KvSignature
from profiles.capacity import CONVERTED, KV_SIGNATURE_PARTS

FP8 = "fp8_e4m3"
_NAMES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "fp8": FP8}
"""Of ``profiles.capacity`` and of ``KvSignature.dtype``."""


def convertible(source: KvSignature, target: KvSignature) -> bool:
    """Whether blocks of ``source`` can be turned into blocks of ``target``.

    Same weights, configuration, layers, heads, head size, block size and form; only the precision differs, and only from
    float32, float16 or bfloat16 to ``fp8_e4m3``, and to a model that asks for it. Forms that pack pairs or tiles by the size
    of an element are not, nor what went through a lossy codec that the target has not got.
    """
    if source.dtype not in numbers.WIDE or target.dtype != FP8:
        return False
    same = (
        source.layers == target.layers
        and source.kv_heads == target.kv_heads
        and source.head_size == target.head_size
        and source.block_size == target.block_size
        and source.form == target.form
        and numbers.plain_form(source.form)
        and source.block_bytes == np.dtype(numbers.RAW[source.dtype]).itemsize * target.block_bytes
    )
    ours, theirs = _model(source), _model(target)
    return same and ours is not None and theirs == (ours[0], (CONVERTED, *ours[1]))


def convertible_from(source: KvIdentity, target: KvIdentity) -> bool:
    """The same of identities: also one trust domain's, and of the same weights by their whole hash."""
    same = source.salt == target.salt and source.weights_hash == target.weights_hash
    return same and convertible(source.signature, target.signature)


def convert(source: KvSignature, block: Buffer, target: KvSignature, into: memoryview, *, scale: float = 1.0) -> None:
    """Writes the block as an engine with an fp8 cache keeps it: ``e4m3(value / scale)``, saturated.

    ``scale`` is that of the engine's layers (``k_scale``, ``v_scale``), 1.0 unless the model's files bring others.

    Raises:
        CodecError: the signatures are not convertible, or a size is not that of its signature.
    """
    if not convertible(source, target):
        raise CodecError("blocks of this precision cannot serve the other")
    if memoryview(block).nbytes != source.block_bytes or into.nbytes != target.block_bytes:
        raise CodecError("a block has another size than its signature says")
    if not 0 < scale < float("inf"):
        raise CodecError("a scale is a number above 0")
    values = numbers.widen(numbers.raw(block, source.dtype), source.dtype)
    if scale != 1.0:
        values /= np.float32(scale)
    numbers.raw(into, FP8)[...] = numbers.to_e4m3(values)


def _model(signature: KvSignature) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The record's signature without the precision, in parts, and what follows it; None when it is of another shape."""
    parts = signature.model.split("-")
    if len(parts) < KV_SIGNATURE_PARTS or _NAMES.get(parts[4]) != signature.dtype:
        return None
    return (*parts[:4], parts[5]), tuple(parts[KV_SIGNATURE_PARTS:])
