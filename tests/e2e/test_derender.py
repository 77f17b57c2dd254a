"""vLLM's detokenizer and our derendering without a model: any text comes out whole, however it is cut."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from subjects.errors import EngineError
from subjects.ids import RequestId
from subjects.messages import Delta, Endpoint
from tests.e2e.engines import replica_spec
from workers.engines.base import EngineRequest
from workers.engines.vllm_process import prepare_process

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    # Warnings of vLLM's own modules are not ours to fix.
    pytest.mark.filterwarnings("ignore:::vllm"),
    pytest.mark.filterwarnings("ignore:::torch"),
]

BODY = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900}'
PROMPT = b'{"prompt": "Hi", "max_tokens": 900}'


@dataclass
class Stage:
    """vLLM's layers for one model, none of its weights."""

    layer: Any
    input_processor: Any
    rendered: dict[Endpoint, Any]
    count: int = 0

    def encode(self, text: str) -> list[int]:
        """The ids of a text as a model would generate it."""
        ids: list[int] = self.layer.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def tokens_for(self, ids: Sequence[int], chars: int) -> int:
        """How many of the tokens it takes to have so many characters whole."""
        return next(n for n in range(len(ids) + 1) if len(self.decode(ids[:n]).rstrip("\ufffd")) >= chars)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        text: str = self.layer.tokenizer.decode(list(ids))
        return text

    def answer(self, endpoint: Endpoint, steps: Sequence[Sequence[int]], **params: Any) -> list[Delta]:
        """The deltas of an answer whose tokens come in these steps."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.engine.output_processor import OutputProcessor

        from workers.engines.vllm_openai import Answer

        rendered = self.rendered[endpoint]
        (prompt,) = rendered.prompts
        chosen = prompt.params.clone()
        for name, value in params.items():
            setattr(chosen, name, value)
        self.count += 1
        request = self.input_processor.process_inputs(
            f"r{self.count}", prompt.engine_input, chosen, supported_tasks=("generate",)
        )
        self.input_processor.assign_request_id(request)
        processor = OutputProcessor(self.layer.tokenizer, log_stats=False)
        processor.add_request(request, None, None, 0)
        answer = Answer(self.layer, replace(rendered, prompts=(replace(prompt, params=chosen),)))
        deltas: list[Delta] = []
        for place, step in enumerate(steps):
            reason = FinishReason.LENGTH if place == len(steps) - 1 else None
            output = EngineCoreOutput(request_id=request.request_id, new_token_ids=list(step), finish_reason=reason)
            outputs = processor.process_outputs([output]).request_outputs
            deltas += [delta for one in outputs for delta in answer.take(0, one)]
            if answer.ended:
                break
        return deltas


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tiny_model: Path) -> AsyncIterator[Stage]:
    """The tiny model's tokenizer writes every character that is not ASCII as bytes, one token each."""
    environment = dict(os.environ)
    prepare_process(on_cpu=True)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config
    from vllm.v1.engine.input_processor import InputProcessor

    from workers.engines.vllm_openai import OpenAiLayer, engine_arguments, register_architecture

    record = replica_spec(str(tiny_model)).record
    register_architecture(record.source)
    config = EngineArgs(**engine_arguments(record), enforce_eager=True).create_engine_config()
    renderer = renderer_from_config(config)
    layer = OpenAiLayer(record, config, renderer, InputProcessor(config, renderer))
    rendered = {}
    for endpoint, body in ((Endpoint.CHAT, BODY), (Endpoint.COMPLETIONS, PROMPT)):
        request = EngineRequest(request=RequestId("gateway-1-1"), attempt=1, endpoint=endpoint, body=body, kv_pages_needed=1)
        rendered[endpoint] = (await layer.render(request)).rendered
    yield Stage(layer, InputProcessor(config, renderer), rendered)
    os.environ.clear()
    os.environ.update(environment)


TEXTS = st.text(st.sampled_from("ab \né€東京😀👩‍🇪"), min_size=1, max_size=24)
CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=8)
ENDPOINTS = st.sampled_from([Endpoint.CHAT, Endpoint.COMPLETIONS])
EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def in_steps(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The ids in steps of these sizes, over and over."""
    steps: list[list[int]] = []
    at = 0
    while at < len(ids):
        size = sizes[len(steps) % len(sizes)]
        steps.append(list(ids[at : at + size]))
        at += size
    return steps


def substrings(text: str) -> st.SearchStrategy[str]:
    """Parts of the text, up to six characters long."""
    places = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6))
    return places.map(lambda place: text[place[0] : place[0] + place[1]])


async def test_characters_come_whole_however_they_are_cut(stage: Stage) -> None:
    """No delta holds part of a character, and together they are the text, its tokens and its count (J: emoji and CJK)."""

    @EXAMPLES
    @given(ENDPOINTS, TEXTS, CUTS)
    @example(Endpoint.CHAT, "👩‍👩‍👧 🇪🇺", [1])
    def check(endpoint: Endpoint, text: str, sizes: list[int]) -> None:
        ids = stage.encode(text)
        assume(stage.decode(ids) == text)
        deltas = stage.answer(endpoint, in_steps(ids, sizes))
        assert "".join(delta.text for delta in deltas) == text
        assert "\ufffd" not in "".join(delta.text for delta in deltas)
        assert [token for delta in deltas for token in delta.token_ids] == ids
        assert [delta.end for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert (deltas[-1].finish_reason, deltas[-1].usage and deltas[-1].usage.completion_tokens) == ("length", len(ids))

    check()


async def test_no_part_of_a_stop_string_is_ever_sent(stage: Stage) -> None:
    """Wherever it begins and ends within tokens and steps: at every moment what was sent is a beginning of what is right."""

    @EXAMPLES
    @given(ENDPOINTS, TEXTS, CUTS, st.data(), st.booleans())
    def check(endpoint: Endpoint, text: str, sizes: list[int], data: st.DataObject, included: bool) -> None:
        ids = stage.encode(text)
        assume(stage.decode(ids) == text)
        stops = data.draw(st.lists(substrings(text), min_size=1, max_size=3)) + data.draw(
            st.lists(st.just("zz"), max_size=1)
        )
        # The one that is complete first ends the answer; of two at once, the one named first.
        ends = [(text.find(stop) + len(stop), place) for place, stop in enumerate(stops) if stop in text]
        first = stops[min(ends)[1]]
        deltas = stage.answer(endpoint, in_steps(ids, sizes), stop=stops, include_stop_str_in_output=included)
        expected = text[: text.find(first)] + (first if included else "")
        sent = ""
        for delta in deltas:
            sent += delta.text
            assert expected.startswith(sent)
        last = deltas[-1]
        assert (sent, last.end, last.finish_reason, last.stop_reason) == (expected, True, "stop", first)
        assert last.usage is not None
        assert last.usage.completion_tokens == sum(delta.units for delta in deltas) == stage.tokens_for(ids, min(ends)[0])

    check()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tool_call_parser": "nope"}, "nope"),
        ({"tool_call_parser": "hermes", "tool_strict_level": "never"}, "auto, function, parameter"),
        ({"reasoning_parser": "nope"}, "nope"),
        ({"tool_call_parser": "mistral"}, "tool call token"),
    ],
    ids=str,
)
async def test_a_parser_that_cannot_be_used_is_told_at_the_start(stage: Stage, options: dict[str, Any], word: str) -> None:
    """One line for the operator, with the place in the model's file; not an error of each request."""
    from workers.engines.vllm_openai import OpenAiLayer

    record = replica_spec("unused", engine_options=options).record
    config, renderer = stage.input_processor.vllm_config, stage.input_processor.renderer
    with pytest.raises(EngineError, match=f"spec.engine.options.*{word}"):
        OpenAiLayer(record, config, renderer, stage.input_processor)


@pytest.mark.parametrize(("option", "level"), [("", "PARAMETER"), ("function", "FUNCTION"), ("auto", "AUTO")], ids=str)
async def test_arguments_follow_the_schema_unless_the_file_says_otherwise(stage: Stage, option: str, level: str) -> None:
    """vLLM's own default lets a forced call be ``null`` for every tool that does not say ``strict``."""
    from workers.engines.vllm_openai import OpenAiLayer

    options = {"tool_call_parser": "hermes"} | ({"tool_strict_level": option} if option else {})
    record = replica_spec("unused", engine_options=options).record
    config, renderer = stage.input_processor.vllm_config, stage.input_processor.renderer
    layer = OpenAiLayer(record, config, renderer, stage.input_processor)
    for parser in (layer.chat.parser_cls, layer.online_renderer.parser):
        assert parser is not None and parser.tool_strict_level.name == level
