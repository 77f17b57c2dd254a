"""An answer as a row of parts: what opens, grows and closes, delta by delta (ING-1)."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api.answer_parts import AnswerParts, Change, Closed, Grew, Kind, Opened
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


def test_pieces_of_several_calls_in_turn() -> None:
    """A call that began while another is open waits until that one is whole: its client has been told of no other."""
    parts = AnswerParts("r")
    first = [delta(tool_calls=[call(0, '{"a":', id="a", name="f"), call(1, '{"b":{', id="b", name="g")]), delta(" ")]
    assert told(parts.add(first)) == [("Opened", 0, ""), ("Grew", 0, '{"a":')]
    assert told(parts.add([delta(tool_calls=[call(1, "}"), call(0, "1}")])])) == [
        ("Grew", 0, "1}"),
        ("Closed", 0, ""),
        ("Opened", 1, ""),
        ("Grew", 1, " "),
        ("Closed", 1, ""),
        ("Opened", 2, ""),
        ("Grew", 2, '{"b":{}'),
    ]
    assert told(parts.add([delta(tool_calls=[call(0, "\n"), call(1, "}")])])) == [("Grew", 2, "}")]
    assert told(parts.end()) == [("Closed", 2, "")]
    assert [(part.call_id, part.name, part.text) for part in parts.calls] == [("a", "f", '{"a":1}'), ("b", "g", '{"b":{}}')]


def test_calls_one_after_the_other_do_not_wait() -> None:
    """The end of the arguments is the end of a call: the next one's are told as they come, and so is reasoning."""
    parts = AnswerParts("r")
    parts.add([delta(tool_calls=[call(0, '{"a"', name="f")]), delta(tool_calls=[call(0, ": {}}\n")])])
    assert told(parts.add([delta(tool_calls=[call(1, '{"b"', name="g")])])) == [
        ("Closed", 0, ""),
        ("Opened", 1, ""),
        ("Grew", 1, '{"b"'),
    ]
    assert told(parts.add([delta(tool_calls=[call(1, ":1}")]), delta(reasoning="so")]))[1:] == [
        ("Closed", 1, ""),
        ("Opened", 2, ""),
        ("Grew", 2, "so"),
    ]


def test_reasoning_waits_while_a_call_is_not_whole() -> None:
    """As text does: a piece of the call that comes after it finds the call open."""
    parts = AnswerParts("r")
    first = [delta(tool_calls=[call(0, "{", name="f")]), delta("x", reasoning="so"), delta(tool_calls=[call(0, "}")])]
    assert told(parts.add(first)) == [("Opened", 0, ""), ("Grew", 0, "{"), ("Grew", 0, "}")]
    assert told(parts.end()) == [
        ("Closed", 0, ""),
        ("Opened", 1, ""),
        ("Grew", 1, "so"),
        ("Closed", 1, ""),
        ("Opened", 2, ""),
        ("Grew", 2, "x"),
        ("Closed", 2, ""),
    ]


def test_reasoning_without_a_word_opens_nothing() -> None:
    """Some engines send the empty field with every piece."""
    parts = AnswerParts("r")
    changes = parts.add([delta("a", reasoning_content=""), delta("b", reasoning="", reasoning_content="")])
    assert told(changes) == [("Opened", 0, ""), ("Grew", 0, "a"), ("Grew", 0, "b")]


def test_calls_that_never_are_whole_come_with_the_end() -> None:
    """Nothing is lost, in the order in which they began."""
    parts = AnswerParts("r")
    parts.add([delta(tool_calls=[call(0, "[", name="f"), call(1, "", name="g"), call(2, "{}", name="h"), call(0, "]")])])
    changes = parts.end()
    assert [part.text for part in parts.parts] == ["[]", "", "{}"]
    assert told(changes)[-3:] == [("Opened", 2, ""), ("Grew", 2, "{}"), ("Closed", 2, "")]


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


ARGUMENTS = st.sampled_from(["", " ", "{", "}", "{}", '{"a":', "1", "[", "{x}"])
PIECES = st.one_of(
    st.text(max_size=3).map(lambda text: delta(text)),
    st.text(max_size=3).map(lambda text: delta(reasoning=text)),
    st.tuples(st.integers(0, 2), ARGUMENTS).map(lambda it: delta(tool_calls=[call(*it, name="f")])),
)


@settings(deadline=None)
@given(st.lists(PIECES, max_size=12))
def test_one_part_is_open_at_a_time_and_nothing_is_lost(deltas: list[Delta]) -> None:
    """Whatever comes: parts open in order, each once and closed once, grow while open, and hold all texts of their kind."""
    parts = AnswerParts("r")
    changes = [change for one in deltas for change in parts.add([one])] + parts.end()
    opened = [one.part.index for one in changes if isinstance(one, Opened)]
    assert opened == [one.part.index for one in changes if isinstance(one, Closed)] == list(range(len(parts.parts)))
    now_open: int | None = None
    for one in changes:
        assert now_open == (None if isinstance(one, Opened) else one.part.index)
        now_open = None if isinstance(one, Closed) else one.part.index
    for kind, key in ((Kind.TEXT, ""), (Kind.REASONING, "reasoning")):
        given_ = [one.text if not key else json.loads(one.detail or b"{}").get(key, "") for one in deltas]
        assert "".join(part.text for part in parts.parts if part.kind is kind) == "".join(given_)
    assert all(
        part.text == "".join(one.text for one in changes if isinstance(one, Grew) and one.part is part)
        for part in parts.parts
    )
    came: dict[int, str] = {}
    for got in deltas:
        for piece in json.loads(got.detail or b"{}").get("tool_calls", ()):
            came[piece["index"]] = came.get(piece["index"], "") + piece["function"]["arguments"]
    calls = {int(part.call_id.removeprefix("call_r_")): part.text for part in parts.calls}
    assert list(calls) == list(came)
    for place, text in calls.items():
        assert came[place].startswith(text)
        assert came[place] == text or isinstance(json.loads(text), dict), "only what follows a whole object may be left out"
