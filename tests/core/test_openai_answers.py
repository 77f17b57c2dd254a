"""Answers as a client gets them: any deltas, put into chunks or into one body, say the same (ING-1, J1 to J3)."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api.openai_answers import DONE, AnswerHead, OpenAiWriter
from subjects.ids import RequestId
from subjects.messages import Delta, Endpoint, Usage
from tests.openai_shapes import check_stream, check_whole, said, said_in_stream

PIECES = st.text(st.characters(codec="utf-8"), max_size=6)
CALLS = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5)), max_size=3)
FINISHES = st.sampled_from(["stop", "length", "tool_calls"])


@settings(max_examples=200, deadline=None)
@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2), PIECES, st.booleans(), CALLS), max_size=12),
    st.lists(FINISHES, min_size=3, max_size=3),
    st.booleans(),
)
def test_any_deltas_give_the_same_answer_in_both_modes(
    chat: bool, pieces: list[tuple[int, str, bool, list[tuple[int, str]]]], finishes: list[str], usage: bool
) -> None:
    """However deltas mix choices, text, log probabilities and calls: chunks put together are the whole answer."""
    endpoint = Endpoint.CHAT if chat else Endpoint.COMPLETIONS
    head = AnswerHead(RequestId("gateway-1-1"), endpoint, "m", 1, choices=3, include_usage=usage)
    named: set[tuple[int, int]] = set()
    deltas = []
    for choice, text, weighed, calls in pieces:
        detail: dict[str, Any] = {}
        if weighed:
            lists = {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": [{text: -1.0}], "text_offset": [0]}
            detail["logprobs"] = {"content": [_token(text)]} if chat else lists
        if chat and calls:
            parts = []
            for index, arguments in calls:
                known = sum(1 for one, _ in named if one == choice)
                index = min(index, known)  # an engine numbers its calls without gaps
                parts.append(_call(index, arguments, named=(choice, index) in named))
                named.add((choice, index))
            detail["tool_calls"] = parts
        deltas.append(_delta(choice, text=text, detail=json.dumps(detail).encode() if detail else b""))
    for choice, reason in enumerate(finishes):
        deltas.append(_delta(choice, finish_reason=reason if chat or reason != "tool_calls" else "stop"))
    counts = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    writer = OpenAiWriter(head)
    data = (writer.events(deltas) + writer.end(counts)).removesuffix(DONE)
    events = [json.loads(line.removeprefix("data: ")) for line in data.decode().split("\n\n") if line]
    body = json.loads(writer.whole(deltas, counts))
    check_whole(body)
    check_stream(events, choices=3, usage=usage)
    assert said_in_stream(events) == said(body)


def _token(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -1.0, "bytes": None, "top_logprobs": []}


def _call(index: int, arguments: str, *, named: bool) -> dict[str, Any]:
    if named:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, "id": f"call-{index}", "type": "function", "function": {"name": "look", "arguments": arguments}}


def _delta(choice: int, **fields: Any) -> Delta:
    return Delta(request=RequestId("gateway-1-1"), attempt=1, choice=choice, first_token_index=0, units=1, **fields)
