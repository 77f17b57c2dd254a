"""Fetch KV or compute it again: a comparison of measured speeds.

Fetching ``n`` blocks takes ``latency + n * bytes / bandwidth``, computing them ``n * tokens / prefill speed``. Blocks arrive
in order, so a part of them is worth something too: what does not arrive by the deadline is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

HALF_LIFE_S = 10.0
"""Bytes that moved long ago count less: their weight halves with each 10 s of transfers since, not of idle time."""
BYTES_PER_S_UNKNOWN = 1e9
"""What is believed of a path that was never measured: high, since only a transfer can correct it, and has a deadline."""
PASSED_OVER_FACTOR = 1.05
"""Belief in a slow path grows by that each time it was passed over, so that it is tried again some day."""
SAMPLE_BYTES_MIN = 256 * 1024
"""Smaller transfers measure latency."""
PATHS_MAX = 1024


@dataclass(slots=True)
class _Path:
    bytes: float = 0.0
    seconds: float = 0.0


class Bandwidths:
    """Measured bytes per second by path: a tier or another worker's node. Recent transfers weigh more."""

    def __init__(self) -> None:
        self._paths: dict[str, _Path] = {}

    def measured(self, path: str, size: int, seconds: float) -> None:
        """A transfer over a path took that long; tiny ones are ignored."""
        if size < SAMPLE_BYTES_MIN or seconds <= 0.0:
            return
        known = self._paths.pop(path, None) or _Path()
        decay = 0.5 ** (seconds / HALF_LIFE_S)
        # The sums decay together: a quotient of sums weighs transfers by their length, as a mean of speeds would not.
        known.bytes = known.bytes * decay + size
        known.seconds = known.seconds * decay + seconds
        self._paths[path] = known
        if len(self._paths) > PATHS_MAX:
            del self._paths[next(iter(self._paths))]

    def failed(self, path: str) -> None:
        """A transfer broke off: the path is believed to be half as fast, until the next one says better."""
        known = self._paths.get(path)
        if known is None:
            self._paths[path] = _Path(BYTES_PER_S_UNKNOWN / 2, 1.0)
        else:
            known.bytes /= 2

    def passed_over(self, path: str) -> None:
        """The path was believed too slow to be used."""
        known = self._paths.get(path)
        if known is not None and known.bytes / known.seconds < BYTES_PER_S_UNKNOWN:
            known.bytes *= PASSED_OVER_FACTOR

    def bytes_per_s(self, path: str) -> float:
        """What is believed of a path."""
        known = self._paths.get(path)
        return known.bytes / known.seconds if known is not None else BYTES_PER_S_UNKNOWN


class Choice(msgspec.Struct, frozen=True):
    """Fetch the first ``blocks`` of those that could be fetched; ``saves_s`` against computing them. 0 blocks: compute."""

    blocks: int
    saves_s: float = 0.0


COMPUTE = Choice(0)


def choose(
    blocks: int,
    *,
    block_bytes: int,
    block_tokens: int,
    bytes_per_s: float,
    latency_s: float,
    prefill_tokens_per_s: float,
    deadline_s: float,
) -> Choice:
    """How many of ``blocks`` to fetch, when ``latency_s`` is what a fetch costs before its first byte.

    ``prefill_tokens_per_s`` of 0: not known, then what arrives in time is fetched.
    """
    left_s = deadline_s - latency_s
    if blocks <= 0 or left_s <= 0.0 or bytes_per_s <= 0.0:
        return COMPUTE
    one_s = block_bytes / bytes_per_s
    in_time = min(blocks, int(left_s / one_s)) if one_s > 0.0 else blocks
    if in_time == 0:
        return COMPUTE
    if prefill_tokens_per_s <= 0.0:
        return Choice(in_time)
    saves_s = in_time * (block_tokens / prefill_tokens_per_s - one_s) - latency_s
    return Choice(in_time, saves_s) if saves_s > 0.0 else COMPUTE
