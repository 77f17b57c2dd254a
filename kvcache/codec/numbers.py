"""Numbers and their places in a block, for the codecs: precisions as numpy reads them, and keys and values as views.

numpy knows neither bfloat16 nor e4m3: the first is the upper half of a float32, the second is looked up in tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvcache.core.identity import KvSignature

Array: TypeAlias = npt.NDArray[Any]
Buffer: TypeAlias = memoryview | bytes | bytearray

RAW = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "fp8_e4m3": "u1"}
WIDE = ("float32", "float16", "bfloat16")
_FLOAT16_MAX = 65504.0
_BFLOAT16_MAX = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])
E4M3_MAX = 448.0
E4M3_NAN = 0x7F


def raw(block: Buffer, dtype: str) -> Array:
    """The block's elements in one row, without a copy; unsigned integers where numpy has no such precision."""
    return np.frombuffer(block, RAW[dtype])


def widen(array: Array, dtype: str) -> Array:
    """As float32, in a new array."""
    if dtype == "bfloat16":
        wide = array.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    if dtype == "fp8_e4m3":
        values: Array = np.take(e4m3_values(), array)
        return values
    return array.astype(np.float32)


def narrow(values: Array, dtype: str) -> Array:
    """From finite or infinite float32, rounded to even; what is too large becomes the largest finite number."""
    if dtype == "float32":
        return np.clip(values, np.finfo(np.float32).min, np.finfo(np.float32).max)
    if dtype == "float16":
        return np.clip(values, -_FLOAT16_MAX, _FLOAT16_MAX).astype(np.float16)
    if dtype == "bfloat16":
        bits = np.clip(values, -_BFLOAT16_MAX, _BFLOAT16_MAX).view(np.uint32)
        bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)
        bits >>= 16
        return bits.astype(np.uint16)
    return to_e4m3(values)


# ---------------------------------------------------------------------------------------------------------------- e4m3


@lru_cache(maxsize=1)
def e4m3_values() -> Array:
    """What each of the 256 bytes means (OCP 8-bit floating point, no infinities, NaN at 0x7F and 0xFF)."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    plain = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    plain[E4M3_NAN] = np.nan
    values: Array = np.concatenate([plain, -plain]).astype(np.float32)
    return values


@lru_cache(maxsize=1)
def _e4m3_codes() -> Array:
    """The byte for each upper half of a float32 whose last bit says that lower ones are set: nearest, ties to even."""
    with np.errstate(invalid="ignore"):
        values = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    known = e4m3_values()[:E4M3_NAN].astype(np.float64)
    above = np.clip(np.searchsorted(known, np.nan_to_num(values, nan=0.0, posinf=1e39)), 1, len(known) - 1)
    below = above - 1
    with np.errstate(invalid="ignore"):
        to_above, to_below = known[above] - values, values - known[below]
        up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = np.where(up, above, below)
    codes[np.isnan(values)] = E4M3_NAN
    both: Array = np.concatenate([codes, codes | 0x80]).astype(np.uint8)
    return both


def to_e4m3(values: Array) -> Array:
    """Bytes of e4m3, rounded to even and saturated at 448 as GPUs do; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    index = (bits >> 16).astype(np.uint16)
    index |= (bits & 0xFFFF) != 0  # an exact tie differs from what lies just above it in this bit alone
    codes: Array = np.take(_e4m3_codes(), index)
    return codes


# --------------------------------------------------------------------------------------------------------------- places


class Part(msgspec.Struct, frozen=True):
    """The keys or the values of a block as a view of it: layers and heads first, then rows to be grouped along.

    ``shape`` is ``(heads of all layers, rows, elements of a row)``: of keys a row is a channel and its elements are tokens,
    of values a row is a token and its elements are channels.
    """

    is_keys: bool
    view: Array
    shape: tuple[int, int, int]

    def read(self) -> Array:
        """The elements in ``shape``, in a row of their own."""
        return np.ascontiguousarray(self.view).reshape(self.shape)

    def write(self, array: Array) -> None:
        """Puts them back where they lie in the block."""
        self.view[...] = array.reshape(self.view.shape)


def parts(signature: KvSignature, elements: Array) -> list[Part]:
    """Keys and values of a block, by its form (``kvcache.engine.tensors``); all as values where the form is not known."""
    layers, heads, tokens, dim = signature.layers, signature.kv_heads, signature.block_size, signature.head_size
    split = _FORMS.get(signature.form.partition(";")[0].partition("@")[0])
    if split is not None and elements.size == 2 * layers * heads * tokens * dim:
        views = split(elements, layers, heads, tokens, dim)
        if views is not None:
            keys, values = views
            return [
                Part(True, keys, (layers * heads, dim, tokens)),
                Part(False, values, (layers * heads, tokens, dim)),
            ]
    row = next(size for size in (dim, 64, 32, 16, 8, 4, 2, 1) if elements.size % size == 0)
    groups = layers if elements.size % (layers * row) == 0 else 1
    shape = (groups, elements.size // (groups * row), row)
    return [Part(False, elements.reshape(shape), shape)]


def plain_form(form: str) -> bool:
    """Whether an element's place does not depend on its size, so that another precision has it at the same place."""
    order = form.partition(";")[0].partition("@")[0]
    return order in _FORMS and not order.startswith("layer,head,kv:")


_Views: TypeAlias = tuple[Array, Array] | None


def _cpu(elements: Array, layers: int, heads: int, tokens: int, dim: int) -> _Views:
    both = elements.reshape(layers, heads, 2, -1)
    return both[:, :, 0].reshape(layers, heads, dim, tokens), both[:, :, 1].reshape(layers, heads, tokens, dim)


def _cpu_amx(elements: Array, layers: int, heads: int, tokens: int, dim: int) -> _Views:
    """Tiles of 16 tokens and pairs of channels, of 32 channels and pairs of tokens (seen by writing known numbers)."""
    if tokens % 16 or dim % 32:
        return None
    both = elements.reshape(layers, heads, 2, -1)
    keys = both[:, :, 0].reshape(layers, heads, tokens // 16, dim // 2, 16, 2).transpose(0, 1, 3, 5, 2, 4)
    values = both[:, :, 1].reshape(layers, heads, dim // 32, tokens // 2, 32, 2).transpose(0, 1, 3, 5, 2, 4)
    return keys, values


def _side_by_side(elements: Array, layers: int, heads: int, tokens: int, dim: int) -> _Views:
    both = elements.reshape(layers, heads, tokens, 2, dim)
    return both[:, :, :, 0].swapaxes(2, 3), both[:, :, :, 1]


def _tokens_first(elements: Array, layers: int, heads: int, tokens: int, dim: int) -> _Views:
    both = elements.reshape(layers, 2, tokens, heads, dim)
    return both[:, 0].transpose(0, 2, 3, 1), both[:, 1].transpose(0, 2, 1, 3)


def _heads_first(elements: Array, layers: int, heads: int, tokens: int, dim: int) -> _Views:
    both = elements.reshape(layers, 2, heads, tokens, dim)
    return both[:, 0].swapaxes(2, 3), both[:, 1]


_FORMS: dict[str, Callable[[Array, int, int, int, int], _Views]] = {
    "layer,head,k:dim.token,v:token.dim": _cpu,
    "layer,head,kv:vec16": _cpu,
    "layer,head,kv:amx": _cpu_amx,
    "layer,head,token,kv": _side_by_side,
    "layer,kv,token,head,dim": _tokens_first,
    "layer,kv,head,token,dim": _heads_first,
}
