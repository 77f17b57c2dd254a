"""Suite 6: LiteLLM as a client of a gateway of ours. Runs in an environment of its own; the last line is JSON.

``$EXTRA_BASE_URL`` is the gateway's endpoint with ``/v1``.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import traceback
from collections.abc import Callable
from typing import Any

import litellm

BASE_URL = os.environ["EXTRA_BASE_URL"]
TO_US: dict[str, Any] = {"api_base": BASE_URL, "api_key": "any", "num_retries": 0, "timeout": 60}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
    },
}


def ask(text: str, **more: Any) -> Any:
    return litellm.completion(model="openai/scripted", messages=[{"role": "user", "content": text}], **TO_US, **more)


def whole() -> None:
    answer = ask("hello 🎉")
    assert answer.choices[0].message.content == "You said: hello 🎉", answer
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0


def stream() -> None:
    chunks = list(ask("one two three", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "You said: one two three", text
    built = litellm.stream_chunk_builder(chunks)
    assert built.usage.completion_tokens == ask("one two three").usage.completion_tokens, built.usage


def stream_async() -> None:
    async def run() -> str:
        reply = await litellm.acompletion(
            model="openai/scripted", messages=[{"role": "user", "content": "later"}], stream=True, **TO_US
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])

    assert asyncio.run(run()) == "You said: later"


def tools() -> None:
    question = "What is the weather in Paris and in Rome?"
    answer = ask(question, tools=[WEATHER], parallel_tool_calls=True)
    calls = answer.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["location"] for call in calls] == ["Paris", "Rome"], calls
    assert answer.choices[0].finish_reason == "tool_calls"
    results = [{"role": "tool", "tool_call_id": call.id, "content": f"rain {place}"} for place, call in enumerate(calls)]
    history = [{"role": "user", "content": question}, answer.choices[0].message.model_dump(), *results]
    final = litellm.completion(model="openai/scripted", messages=history, tools=[WEATHER], **TO_US)
    assert final.choices[0].message.content == "The tool says: rain 1", final


def tools_streamed() -> None:
    chunks = list(ask("Use the tool", tools=[WEATHER], tool_choice="required", stream=True))
    call = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and "location" in json.loads(call.function.arguments), call


def schema() -> None:
    wanted = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    answer = ask("'Turin'", response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": wanted}})
    assert json.loads(answer.choices[0].message.content) == {"city": "Turin"}


def embedding() -> None:
    answer = litellm.embedding(model="openai/embedder", input=["a", "b"], **TO_US)
    assert len(answer.data) == 2
    assert abs(math.hypot(*answer.data[0]["embedding"]) - 1) < 1e-3
    assert answer.usage.prompt_tokens > 0


def text_completion() -> None:
    answer = litellm.text_completion(model="text-completion-openai/simulated", prompt="Once", max_tokens=4, **TO_US)
    assert answer.usage.completion_tokens == 4, answer


def responses() -> None:
    answer = litellm.responses(model="openai/scripted", input="hello", **TO_US)
    texts = [part.text for item in answer.output if item.type == "message" for part in item.content]
    assert texts == ["You said: hello"], answer


def messages() -> None:
    """LiteLLM speaks Anthropic's API to a model of that provider."""
    to_us = TO_US | {"api_base": BASE_URL.removesuffix("/v1")}
    asked = [{"role": "user", "content": "hello"}]
    answer = litellm.completion(model="anthropic/scripted", messages=asked, max_tokens=64, **to_us)
    assert answer.choices[0].message.content == "You said: hello", answer
    chunks = litellm.completion(model="anthropic/scripted", messages=asked, max_tokens=64, stream=True, **to_us)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "You said: hello"


def errors() -> None:
    for model, more, expected in (
        ("openai/nobody", {}, litellm.NotFoundError),
        ("openai/scripted", {"temperature": 9}, litellm.BadRequestError),
    ):
        try:
            litellm.completion(model=model, messages=[{"role": "user", "content": "x"}], **TO_US, **more)
        except expected:
            continue
        raise AssertionError(f"{model} {more}: not a {expected.__name__}")


CHECKS: tuple[Callable[[], None], ...] = (
    whole,
    stream,
    stream_async,
    tools,
    tools_streamed,
    schema,
    embedding,
    text_completion,
    responses,
    messages,
    errors,
)


def main() -> None:
    """Runs all checks."""
    passed, failures = [], []
    for check in CHECKS:
        try:
            check()
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{check.__name__}: {type(error).__name__}: {str(error)[:300]}".replace("\n", " "))
        else:
            passed.append(check.__name__)
    print(json.dumps({"passed": passed, "failures": failures}), flush=True)


if __name__ == "__main__":
    main()
