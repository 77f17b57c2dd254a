"""The write budget of a store across restarts."""

from __future__ import annotations

import msgspec

from kvcache.core.shelf import WriteBudget
from kvcache.store.segments import SegmentFiles

BUDGET_FILE = "written.budget"
_BUDGET_FILE_BYTES_MAX = 4096
_BUDGET_STEP_BYTES_MAX = 256 * 2**20


class _BudgetFile(msgspec.Struct, frozen=True, kw_only=True):
    left: float
    at_s: float


class KeptBudget:
    """The write budget, kept in a file so that a restart does not refill it.

    The file never says more than is left: a step is taken off in advance and given back when the store is closed, so a kill
    costs at most one step.
    """

    def __init__(self, files: SegmentFiles, bytes_per_day_max: int | None, now_s: float) -> None:
        self._files = files
        self._bucket = WriteBudget.full(bytes_per_day_max, now_s)
        self.damaged = False
        self._on_disk: float | None = None
        if bytes_per_day_max is None:
            return
        self._step = min(_BUDGET_STEP_BYTES_MAX, bytes_per_day_max // 64)
        try:
            data = files.read_small(BUDGET_FILE, _BUDGET_FILE_BYTES_MAX)
            if data is not None:
                kept = msgspec.json.decode(data, type=_BudgetFile)
                self._bucket.left, self._bucket.at_s = kept.left, min(kept.at_s, now_s)
                self._bucket.refill(now_s)
        except (OSError, msgspec.MsgspecError):
            self.damaged = True
            self._bucket.left = 0.0

    @property
    def left_bytes(self) -> int | None:
        """As of the last write."""
        return None if self._bucket.bytes_per_day_max is None else int(self._bucket.left)

    def left_at(self, now_s: float) -> int | None:
        """As of now."""
        self._bucket.refill(now_s)
        return self.left_bytes

    def take(self, wanted_bytes: int, now_s: float) -> bool:
        if not self._bucket.take(wanted_bytes, now_s):
            return False
        if self._bucket.bytes_per_day_max is not None and (self._on_disk is None or self._bucket.left < self._on_disk):
            self._write(max(0.0, self._bucket.left - self._step))
        return True

    def give_back(self, unused_bytes: int) -> None:
        self._bucket.give_back(unused_bytes)

    def save(self) -> None:
        """What is left, to the byte."""
        if self._bucket.bytes_per_day_max is not None:
            self._write(self._bucket.left)

    def _write(self, left: float) -> None:
        try:
            self._files.write_small(BUDGET_FILE, msgspec.json.encode(_BudgetFile(left=left, at_s=self._bucket.at_s)))
            self._on_disk = left
        except OSError:
            # Where this cannot be written, pages cannot either; they say why.
            self._on_disk = None
