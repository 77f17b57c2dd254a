"""An answer as a row of parts: what opens, grows and closes, delta by delta (ING-1)."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.answer_parts import AnswerParts, Change, Closed, Grew, Kind, Opened
from subjects.ids import RequestId
from subjects.messages import Delta


def delta(text: str = "", *, finish: str | None = None, stop: str | int | None = None, **detail: Any) -> Delta:
    """One delta of choice 0."""
    raw = json.dumps(detail).encode() if detail else b""
    return Delta(
        request=RequestId("r"),
        attempt=1,
        first_token_index=0,
        units=1,
        text=text,
        detail=raw,
        finish_reason=finish,
        stop_reason=stop,
    )


def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    """One piece of a call; ``id`` and ``name`` come with its first."""
    name = {"name": more.pop("name")} if "name" in more else {}
    return {"index": index, "function": {"arguments": arguments, **name}, **more}


def told(changes: list[Change]) -> list[tuple[str, int, str]]:
    """``(what, index, text)`` of each change."""
    return [(type(one).__name__, one.part.index, one.text if isinstance(one, Grew) else "") for one in changes]


def test_parts_follow_each_other() -> None:
    """Reasoning, text and calls: each closes before the next opens, also within one delta."""
    parts = AnswerParts("r")
    changes = parts.add(
        [
            delta(reasoning="why"),
            delta("so ", reasoning_content="?"),
            delta("it is", tool_calls=[call(0, "", id="a", name="f"), call(1, "{}", id="b", name="g")]),
            delta(finish="tool_calls"),
        ]
    )
    assert told(changes + parts.end()) == [
        ("Opened", 0, ""),
        ("Grew", 0, "why"),
        ("Grew", 0, "?"),
        ("Closed", 0, ""),
        ("Opened", 1, ""),
        ("Grew", 1, "so "),
        ("Grew", 1, "it is"),
        ("Closed", 1, ""),
        ("Opened", 2, ""),
        ("Closed", 2, ""),
        ("Opened", 3, ""),
        ("Grew", 3, "{}"),
        ("Closed", 3, ""),
    ]
    assert [(part.kind, part.text, part.call_id, part.name) for part in parts.parts] == [
        (Kind.REASONING, "why?", "", ""),
        (Kind.TEXT, "so it is", "", ""),
        (Kind.CALL, "", "a", "f"),
        (Kind.CALL, "{}", "b", "g"),
    ]
    assert (parts.finish_reason, [part.call_id for part in parts.calls]) == ("tool_calls", ["a", "b"])


def test_text_waits_while_a_call_is_open() -> None:
    """White space that a model writes between the pieces of a call does not tear the call apart; nothing is lost."""
    parts = AnswerParts("r")
    first = [delta(tool_calls=[call(0, '{"a":', id="a", name="f")]), delta("\n"), delta(tool_calls=[call(0, "1}")])]
    assert told(parts.add(first)) == [("Opened", 0, ""), ("Grew", 0, '{"a":'), ("Grew", 0, "1}")]
    assert told(parts.end()) == [("Closed", 0, ""), ("Opened", 1, ""), ("Grew", 1, "\n"), ("Closed", 1, "")]


def test_a_late_piece_of_a_call_is_kept() -> None:
    """Should an engine go back to a call that was left, its arguments are still whole."""
    parts = AnswerParts("r")
    parts.add([delta(tool_calls=[call(0, "[", id="a", name="f"), call(1, "{}", id="b", name="g"), call(0, "]")])])
    assert [part.text for part in parts.parts] == ["[]", "{}"]


def test_log_probabilities_go_with_the_next_text() -> None:
    """Those of a token without text of its own too; those of reasoning go with nothing."""
    parts = AnswerParts("r")
    changes = parts.add(
        [
            delta(reasoning="hm", logprobs={"content": ["t0"]}),
            delta(logprobs={"content": ["t1"]}),
            delta("ab", logprobs={"content": ["t2"]}),
            delta("c", logprobs={"content": ["t3"]}),
        ]
    )
    assert [one.logprobs for one in changes if isinstance(one, Grew)] == [(), ("t1", "t2"), ("t3",)]
    assert parts.parts[1].logprobs == ["t1", "t2", "t3"]


def test_what_an_engine_left_out_is_made_up() -> None:
    """A call without an id or an index gets both; a broken detail costs only itself; other choices do not count."""
    parts = AnswerParts("r")
    broken = Delta(request=RequestId("r"), attempt=1, first_token_index=0, units=1, text="x", detail=b"{")
    other = Delta(request=RequestId("r"), attempt=1, choice=1, first_token_index=0, units=1, text="no")
    parts.add([broken, other, delta(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}, "?"])])
    assert [(part.text, part.call_id) for part in parts.parts] == [("x", ""), ("{}", "call_r_0")]


PIECES = st.one_of(
    st.text(max_size=3).map(lambda text: delta(text)),
    st.text(max_size=3).map(lambda text: delta(reasoning=text)),
    st.tuples(st.integers(0, 2), st.text(max_size=3)).map(lambda it: delta(tool_calls=[call(*it, name="f")])),
)


@settings(deadline=None)
@given(st.lists(PIECES, max_size=12))
def test_one_part_is_open_at_a_time_and_nothing_is_lost(deltas: list[Delta]) -> None:
    """Whatever comes: parts open in order, each once and closed once, and hold all texts of their kind in order."""
    parts = AnswerParts("r")
    changes = [change for one in deltas for change in parts.add([one])] + parts.end()
    opened = [one.part.index for one in changes if isinstance(one, Opened)]
    assert opened == [one.part.index for one in changes if isinstance(one, Closed)] == list(range(len(parts.parts)))
    depth = 0
    for one in changes:
        depth += isinstance(one, Opened) - isinstance(one, Closed)
        assert 0 <= depth <= 1
    for kind, key in ((Kind.TEXT, ""), (Kind.REASONING, "reasoning")):
        given_ = [one.text if not key else json.loads(one.detail or b"{}").get(key, "") for one in deltas]
        assert "".join(part.text for part in parts.parts if part.kind is kind) == "".join(given_)
    assert all(
        part.text == "".join(one.text for one in changes if isinstance(one, Grew) and one.part is part)
        for part in parts.parts
    )
