"""Blocks of one precision that may serve another of the same weights: float16/bfloat16/float32 for an fp8 KV cache."""

from __future__ import annotations

from kvcache.core.identity import KvSignature


def convertible(source: KvSignature, target: KvSignature) -> bool:
    """Whether blocks of ``source`` can be turned into blocks of ``target``.

    Same weights, configuration, layers, heads, head size, block size and form; only the precision differs, and only from
    float32, float16 or bfloat16 to ``fp8_e4m3``.
    """
    raise NotImplementedError


def convert(
    source: KvSignature, block: memoryview | bytes, target: KvSignature, into: memoryview, *, scale: float = 1.0
) -> None:
    """Writes the block as the engine with the fp8 cache would have kept it: ``e4m3(value / scale)``, saturated.

    Raises:
        CodecError: the signatures are not convertible, or a size is not that of its signature.
    """
    raise NotImplementedError
