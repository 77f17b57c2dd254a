"""Makes ``ops/bench/data/shared-docs.json``: ``python -m tests.workloads.shared_docs``."""

from __future__ import annotations

import msgspec
import numpy as np

from ops.bench.shared_docs import PATH, Workload

SEED = 20_260_501
DOCUMENTS = 4
QUESTIONS = 3
SENTENCES = 75
"""Over 1,500 tokens with any tokenizer of English."""

_WHO = (
    "the harbour master",
    "a young surveyor",
    "the committee",
    "Mrs Adeyemi",
    "the night watch",
    "an engineer from Porto",
)
_DID = ("measured", "described", "repaired", "inspected", "wrote down", "sold", "compared", "painted", "moved", "counted")
_WHAT = ("the northern pier", "two hundred crates", "the old pumps", "every lamp", "the tide tables", "a broken winch")
_WHEN = ("in the spring", "before sunrise", "after the flood", "during the strike", "on the third day", "without delay")
_WHY = ("because the river had risen", "so that ships could land", "although nobody had asked", "as the contract required")
_ASK = (
    "Who is mentioned most often, and why?",
    "What was repaired, and when did that happen?",
    "Summarise the document in one sentence.",
)


def make(seed: int = SEED) -> Workload:
    """The workload of this seed."""
    random = np.random.Generator(np.random.PCG64(seed))

    def pick(choices: tuple[str, ...]) -> str:
        return choices[int(random.integers(len(choices)))]

    documents = []
    for number in range(DOCUMENTS):
        sentences = [f"Report {number + 1} of the harbour office."]
        for _ in range(SENTENCES):
            count = int(random.integers(2, 900))
            text = f"{pick(_WHO)} {pick(_DID)} {pick(_WHAT)} {pick(_WHEN)} {pick(_WHY)}, for {count} crowns."
            sentences.append(text[0].upper() + text[1:])
        documents.append(" ".join(sentences))
    pairs = [(document, question) for document in range(DOCUMENTS) for question in range(QUESTIONS)]
    order = tuple(pairs[int(index)] for index in random.permutation(len(pairs)))
    return Workload(seed=seed, documents=tuple(documents), questions=_ASK, order=order)


def encoded(workload: Workload) -> bytes:
    """As the file holds it."""
    return msgspec.json.format(msgspec.json.encode(workload), indent=1) + b"\n"


if __name__ == "__main__":
    PATH.write_bytes(encoded(make()))
    print(PATH)
