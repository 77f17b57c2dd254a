"""The lists of ``make check-extra`` and the scripted model that answers there; the suites need a package index."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.extra.exclusions import PAGE, exclusions, page
from tests.extra.outcome import Outcome
from tests.extra.script import Refused, answer
from tests.extra.tools import LOCKS


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def _asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


WEATHER = _tool("get_weather", location={"type": "string"})


def test_the_page_of_exclusions_is_the_list() -> None:
    """What people read is what the runner reads: ``python -m tests.extra --write-page`` makes it."""
    assert PAGE.read_text() == page()
    assert all(one.reason.endswith(".") and (one.files or one.tests) for one in exclusions())


def test_locks_of_suites_hold_names_and_versions_only() -> None:
    """As in the project's own lock: no URL, no path, no extra index."""
    locks = sorted(LOCKS.glob("*.lock"))
    lines = [line for lock in locks for line in lock.read_text().splitlines()]
    assert locks and [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []


@pytest.mark.parametrize(
    ("outcome", "ok"),
    [
        (Outcome(suite="a", passed=1, excluded=9), True),
        (Outcome(suite="a", excluded=9), False),
        (Outcome(suite="a", passed=1, failed=1), False),
        (Outcome(suite="a", passed=1, failures=("an exclusion matches nothing",)), False),
        (Outcome(suite="a", skipped="node is not on PATH"), True),
    ],
)
def test_a_suite_that_ran_nothing_has_failed(outcome: Outcome, ok: bool) -> None:
    """Only what the machine lacks is a reason to run nothing."""
    assert outcome.ok is ok


def test_calls_are_made_of_the_tools_and_the_text() -> None:
    """Names come from the tools, arguments from the user's words by the schema, one call for each place."""
    said = answer(_asked("What is the weather in Paris and in Rome?", tools=[_tool("add", a={"type": "integer"}), WEATHER]))
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [
        ("get_weather", {"location": "Paris"}),
        ("get_weather", {"location": "Rome"}),
    ]
    assert said.finish_reason == "tool_calls"
    single = answer(_asked("What is the weather in Paris and in Rome?", tools=[WEATHER], parallel_tool_calls=False))
    assert len(single.calls) == 1
    named = {"type": "function", "function": {"name": "add"}}
    forced = answer(_asked("3", tools=[WEATHER, _tool("add", a={"type": "integer"})], tool_choice=named))
    assert ([json.loads(call.arguments) for call in forced.calls], forced.finish_reason) == ([{"a": 3}], "stop")
    assert answer(_asked("the weather in Paris", tools=[WEATHER], tool_choice="none")).calls == ()
    assert answer(_asked("good morning", tools=[WEATHER])).calls == ()


def test_a_result_without_its_call_is_refused() -> None:
    """A conversation whose parts did not all come through is not answered."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    user = {"role": "user", "content": "the weather in Paris"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    whole = [user, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert "".join(answer({"messages": whole, "tools": [WEATHER]}).pieces) == "The tool says: rain"
    for broken in ([user, result], [*whole[:2], user]):
        with pytest.raises(Refused):
            answer({"messages": broken})


def test_texts_end_at_stop_strings_and_bounds() -> None:
    """Finish reasons and texts are those an engine gives."""
    assert answer(_asked("one two three", stop=["two"])).pieces == ("You", " said:", " one", " ")
    short = answer(_asked("one two three", max_tokens=2))
    assert (short.pieces, short.finish_reason) == (("You", " said:"), "length")
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "people": {"$ref": "#/$defs/n"}}}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema | {"$defs": {"n": {"type": "integer"}}}}}
    said = answer(_asked("'Turin' has 850000", response_format=wanted))
    assert json.loads("".join(said.pieces)) == {"city": "Turin", "people": 850000}
