"""The fixed workload of questions to shared documents."""

from __future__ import annotations

from ops.bench import shared_docs
from tests.workloads.shared_docs import encoded, make


def test_the_file_is_what_its_seed_gives() -> None:
    """Whoever measures with it measures with the same texts, in the same order."""
    assert shared_docs.PATH.read_bytes() == encoded(make())


def test_each_document_is_asked_each_question_once() -> None:
    """In one order, in which no document is asked about all at once."""
    workload = shared_docs.read()
    assert sorted(workload.order) == [(document, question) for document in range(4) for question in range(3)]
    assert all(len(text.split()) > 900 for text in workload.documents)
    assert len({document for document, _ in workload.order[:4]}) > 1
    assert make(1).documents != workload.documents
