"""The fixed workload of questions to shared documents, ``data/shared-docs.json``; ``tests.workloads.shared_docs`` made it.

Four documents of made-up but readable English, three questions to each, in one order drawn by the seed. For a length
of L tokens the first L tokens of each document are asked about, so that the curve over L differs in nothing else.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

PATH = Path(__file__).parent / "data" / "shared-docs.json"


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts, and the order of questions: pairs of a document's and a question's number."""

    seed: int
    documents: tuple[str, ...]
    questions: tuple[str, ...]
    order: tuple[tuple[int, int], ...]


def read() -> Workload:
    """The workload of the file."""
    return msgspec.json.decode(PATH.read_bytes(), type=Workload)
