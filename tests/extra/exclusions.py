"""``exclusions.toml``: what is not run or must fail, each with its reason, and the page that people read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

HERE = Path(__file__).parent
LIST = HERE / "exclusions.toml"
PAGE = HERE / "EXCLUSIONS.md"
_SUMMARY = """# What `make check-extra` does not ask of us

Made from `exclusions.toml` by `python -m tests.extra --write-page`; the runner reads that list. Everything in a suite that
is not listed there runs and has to pass, so a new version of a suite brings its new tests along.

- *not run*: the tests speak to no server, to routes that we do not serve, or need a better model than the one that is asked.
- *fails*: the tests run and must fail for this reason, with an error in which the pattern is found; one that passes or fails
  with another error fails the check, so that no line outlives its reason and none hides a fault.
- *skipped*: the suite itself skips the tests, because it was told that the feature is absent or needs something else.

A test that a suite skips for a reason that is not listed fails the check, and so does a line that matches nothing.
"""


class Exclusion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shell patterns of files that are not read, or of tests by pytest's node ids, relative to the suite's root.

    Of tests that must fail, ``failure`` is a regular expression that is found in the error of each.
    """

    suite: str
    how: Literal["not run", "fails", "skipped"]
    reason: str
    files: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    failure: str = ""

    def __post_init__(self) -> None:
        """A list in which something is missing is refused."""
        if (self.how == "fails") != bool(self.failure):
            raise ValueError(f"{self.reason!r}: 'failure' goes with how = \"fails\", and only with that")
        try:
            re.compile(self.failure)
        except re.error as error:
            raise ValueError(f"{self.reason!r}: 'failure' is no regular expression: {error}") from None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    exclusion: tuple[Exclusion, ...]


def exclusions(suite: str | None = None) -> list[Exclusion]:
    """Those of one suite, or all."""
    listed = msgspec.convert(tomllib.loads(LIST.read_text()), _File).exclusion
    return [one for one in listed if suite in (None, one.suite)]


def page() -> str:
    """The text of ``EXCLUSIONS.md``."""
    lines = [_SUMMARY]
    suites = list(dict.fromkeys(one.suite for one in exclusions()))
    for suite in suites:
        lines += [f"## {suite}", "", "| What | How | Why |", "|---|---|---|"]
        lines += [
            f"| {'<br>'.join(f'`{pattern}`' for pattern in (*one.files, *one.tests))} | {_how(one)} | {one.reason} |"
            for one in exclusions(suite)
        ]
        lines.append("")
    return "\n".join(lines)


def _how(one: Exclusion) -> str:
    return f"{one.how}: `{one.failure}`" if one.failure else one.how
