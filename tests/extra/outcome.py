"""What a suite says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

FAILURES_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What every suite gets: the endpoint with ``/v1``, the scripted server's own address, a folder for its files, and a
    folder with the tokenizer of the model ``paced``."""

    base_url: str
    scripted_url: str
    directory: Path
    tokenizer: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one suite. ``skipped`` says what the machine lacks; such a suite has run nothing."""

    suite: str
    passed: int = 0
    failed: int = 0
    excluded: int = 0
    excluded_files: int = 0
    """Files of tests that were not read, so that the number of their tests is not known."""
    failures: tuple[str, ...] = ()
    """One line each."""
    skipped: str = ""
    version: str = ""
    took_s: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing failed. A suite that ran nothing and was not skipped has failed."""
        return bool(self.skipped) or (not self.failed and not self.failures and self.passed > 0)

    def line(self) -> str:
        """For people."""
        if self.skipped:
            return f"{self.suite}: skipped: {self.skipped}"
        files = f" and {self.excluded_files} files" if self.excluded_files else ""
        verdict = "ok" if self.ok else "FAILED"
        counts = f"{self.passed} passed, {self.failed} failed, {self.excluded} excluded{files}"
        return f"{self.suite} {self.version}: {verdict}: {counts} ({self.took_s:.0f} s)"


Suite = Callable[[Surroundings], Awaitable[Outcome]]
