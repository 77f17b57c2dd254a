"""Tokenizers and chat templates bound to a model (ING-6, PAINS I1)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from profiles.smollm2 import ensure_smollm2
from profiles.tiny import make_tiny
from profiles.tokenizer import DEFAULT_CHAT_TEMPLATE, EstimatedTokenizer, ModelTokenizer, Tokenizers
from subjects.errors import ApiError, ConfigError
from subjects.ids import ModelHash
from subjects.messages import Endpoint, ModelRecord

USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny model's directory."""
    return make_tiny("a", tmp_path / "a", seed=1)


def with_template(directory: Path, template: Any, **config: Any) -> ModelTokenizer:
    """The tokenizer of ``directory`` with another chat template in its configuration."""
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template} | config))
    return ModelTokenizer(directory)


def record(model_hash: str, source: str, tokenizer_hash: str = "", **changes: Any) -> ModelRecord:
    """A record whose tokenizer lies in ``source``."""
    values: dict[str, Any] = {"name": "a", "weights_hash": "w", "weights_bytes": 1, "kv_bytes_per_token": 1, "kv_bytes": 1}
    values |= {"budget_bytes": 1, "max_context_len": 10, "source": source, "tokenizer_source": source}
    return ModelRecord(model_hash=ModelHash(model_hash), tokenizer_hash=tokenizer_hash, **values | changes)


# --------------------------------------------------------------------------------------------------------------- bodies


def test_chat_and_completions_of_the_tiny_model(tiny: Path) -> None:
    """Special tokens come from the template in chat, and text that names one is that token, as in the engine."""
    tokenizer = ModelTokenizer(tiny)
    chat = tokenizer.prompts(Endpoint.CHAT, {"messages": [USER]})
    assert chat == [[257, *b"user\nHi", 258, 10, 257, *_fragments(tokenizer, "assistant\n")]]
    assert tokenizer.prompts(Endpoint.COMPLETIONS, {"prompt": "Hi"}) == [[72, 105]]
    assert tokenizer.prompts(Endpoint.COMPLETIONS, {"prompt": ["Hi", "", "A"]}) == [[72, 105], [], [65]]
    assert tokenizer.prompts(Endpoint.COMPLETIONS, {"prompt": [5, 6]}) == [[5, 6]]
    assert tokenizer.prompts(Endpoint.COMPLETIONS, {"prompt": [[5], [6, 7]]}) == [[5], [6, 7]]
    assert tokenizer.count("Hi") == 2
    assert tokenizer.exact


def _fragments(tokenizer: ModelTokenizer, text: str) -> list[int]:
    return tokenizer.prompts(Endpoint.COMPLETIONS, {"prompt": text})[0]


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (Endpoint.CHAT, {}, "messages"),
        (Endpoint.CHAT, {"messages": []}, "messages"),
        (Endpoint.CHAT, {"messages": "hi"}, "messages"),
        (Endpoint.CHAT, {"messages": ["hi"]}, "messages"),
        (Endpoint.CHAT, {"messages": [{"content": "no role"}]}, "messages"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        (Endpoint.CHAT, {"messages": [USER], "chat_template_kwargs": 5}, "chat_template_kwargs"),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, None),
        (Endpoint.COMPLETIONS, {}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": []}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": [True]}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": ["x"] * 3000}, "prompt"),
        (Endpoint.COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    ],
)
def test_bodies_that_cannot_be_rendered(tiny: Path, endpoint: Endpoint, body: dict[str, Any], param: str | None) -> None:
    """Each is a 400 that names the field, for a real tokenizer."""
    with pytest.raises(ApiError) as caught:
        ModelTokenizer(tiny).prompts(endpoint, body)
    assert (caught.value.status, caught.value.param) == (400, param)


# ------------------------------------------------------------------------------------------------------------ templates

BLOCKS = """{% for message in messages %}
    {% if message.role == 'user' %}
U:{{ message.content }}
    {% endif %}
{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "body", "text"),
    [
        (BLOCKS, {}, "U:Hi\n"),  # trim_blocks and lstrip_blocks
        ("{{ bos_token }}{{ eos_token }}", {}, "<|endoftext|><|im_end|>"),
        ("{{ {'a': '<ü>'} | tojson }}", {}, '{"a": "<ü>"}'),
        ("{{ [1] | tojson(indent=2) }}", {}, "[\n  1\n]"),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", {}, "user"),
        ("{% generation %}x{% endgeneration %}y", {}, "xy"),
        ("{{ strftime_now('%Y') | length }}", {}, "4"),
        ("{{ add_generation_prompt }}", {}, "True"),
        ("{{ add_generation_prompt }}", {"add_generation_prompt": False}, "False"),
        ("{{ tools is none }}", {"tools": []}, "True"),
        ("{{ tools[0].function.name }}", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "f"),
        ("{{ tools is none }}", {"tools": [{}], "tool_choice": "none"}, "True"),
        ("{{ enable_thinking }}", {"chat_template_kwargs": {"enable_thinking": False}}, "False"),
        ("{{ messages[0].content }}", {"messages": [{"role": "user", "content": None}]}, ""),
        (
            "{{ messages[0].content }}",
            {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]},
            "a\nb",
        ),
        (
            "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}]},
            "[b][c]",
        ),
        (
            "{{ messages[0].tool_calls[0].function.arguments.x }}",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 7}'}}]}]},
            "7",
        ),
        (
            "{{ messages[0].tool_calls is defined }}",
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]},
            "False",
        ),
        ("{{ messages[0].content }}END", {"continue_final_message": True}, "Hi"),
        (
            "{{ messages[0].content }}END",
            {"continue_final_message": True, "messages": [USER | {"content": " a b \n"}]},
            " a b \n",
        ),
        (
            "{{ messages[0].content|trim }}E",
            {"continue_final_message": True, "messages": [USER | {"content": " a b \n"}]},
            "a b",
        ),
        (
            "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}",
            {
                "continue_final_message": True,
                "messages": [USER | {"content": [{"type": "text", "text": "b"}, {"type": "text", "text": "b "}]}],
            },
            "[b][b ",
        ),
    ],
)
def test_template_semantics(tiny: Path, template: str, body: dict[str, Any], text: str) -> None:
    """Templates are rendered as the model's authors wrote them for transformers, with the engine's message shapes."""
    assert with_template(tiny, template).render_chat({"messages": [USER]} | body) == text


def test_a_template_may_refuse(tiny: Path) -> None:
    """``raise_exception`` becomes a 400 that carries the template's own words."""
    tokenizer = with_template(tiny, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ApiError, match="roles must alternate"):
        tokenizer.render_chat({"messages": [USER]})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ cycler.__init__.__globals__.os.getpid() }}",
        "{{ undefined_name.attribute }}",
        "{{ 1 / 'a' }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
    ],
)
def test_templates_are_sandboxed(tiny: Path, template: str) -> None:
    """A model's template cannot reach the process, change the messages, or fail in an uncontrolled way."""
    with pytest.raises(ApiError) as caught:
        with_template(tiny, template).render_chat({"messages": [dict(USER)]})
    assert caught.value.status == 400


def test_where_templates_come_from(tiny: Path) -> None:
    """The service's own beats a file, a file beats the configuration; named ones are for tools; else the default."""
    body = {"messages": [USER]}
    tools = body | {"tools": [{"type": "function", "function": {"name": "f"}}]}
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert with_template(tiny, named).render_chat(body) == "D"
    assert with_template(tiny, named).render_chat(tools) == "T"
    assert with_template(tiny, None).render_chat(body) == "user: Hi\nassistant: "
    assert DEFAULT_CHAT_TEMPLATE.endswith("assistant: {% endif %}")
    (tiny / "chat_template.jinja").write_text("F")
    assert with_template(tiny, "C").render_chat(body) == "F"
    assert ModelTokenizer(tiny, "S").render_chat(body) == "S"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"{}", "is not a tokenizer"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer_config.json", b"{", "is not JSON"),
        ("chat_template.jinja", b"{% if %}", "the chat template is broken"),
        ("chat_template.jinja", b"\xff", "not text in UTF-8"),
        ("chat_template.jinja", b"x" * ((1 << 20) + 1), "over 1 MiB"),
    ],
)
def test_broken_files(tiny: Path, file: str, content: bytes | None, message: str) -> None:
    """Each broken file is one line that names it."""
    if content is None:
        (tiny / file).unlink()
    else:
        (tiny / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        ModelTokenizer(tiny)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------- without files


def test_estimates_say_so() -> None:
    """Where a model has no tokenizer the count is an estimate from bytes, and never another model's (ING-6)."""
    tokenizer = EstimatedTokenizer()
    assert not tokenizer.exact
    assert tokenizer.count("x" * 41) == 11
    [ids] = tokenizer.prompts(Endpoint.CHAT, {"messages": [{"role": "user", "content": "x" * 40}]})
    assert len(ids) == 4 + 10
    first, second = tokenizer.prompts(Endpoint.COMPLETIONS, {"prompt": ["the same start, then a", "the same start, then b"]})
    assert first[:5] == second[:5] and first != second
    assert tokenizer.prompts(Endpoint.COMPLETIONS, {"prompt": [7, 8]}) == [[7, 8]]
    with pytest.raises(ApiError):
        tokenizer.prompts(Endpoint.CHAT, {"messages": []})


# ---------------------------------------------------------------------------------------------------------------- cache


def test_cache_loads_once_and_is_bounded(tiny: Path) -> None:
    """Equal hash, same object; the one used longest ago goes; forgetting forgets."""
    cache = Tokenizers(entries_max=2)
    one, two, three = (record(digit * 64, str(tiny)) for digit in "123")
    assert cache.peek(one) is None
    first = cache.get(one)
    assert cache.get(one) is cache.peek(one) is first
    cache.get(two)
    cache.get(one)
    cache.get(three)
    assert cache.peek(two) is None
    assert cache.peek(one) is first
    cache.forget(one.model_hash)
    assert cache.peek(one) is None


def test_equal_tokenizers_are_shared_and_others_never(tiny: Path, tmp_path: Path) -> None:
    """Precision variants share one loaded tokenizer; a model with other files gets its own counts."""
    other = make_tiny("b", tmp_path / "b", seed=2)
    with_template(other, "another template")
    cache = Tokenizers()
    shared = cache.get(record("1" * 64, str(tiny), "h"))
    assert cache.get(record("2" * 64, str(tiny), "h")) is shared
    assert cache.get(record("3" * 64, str(other), "other")).prompts(Endpoint.CHAT, {"messages": [USER]}) != shared.prompts(
        Endpoint.CHAT, {"messages": [USER]}
    )
    declared = record("4" * 64, str(tiny), "third", engine_options={"chat_template": "A"})
    assert cache.get(declared).prompts(Endpoint.CHAT, {"messages": [USER]}) == [[65]]
    assert not cache.get(record("5" * 64, "", tokenizer_source="")).exact


def test_many_threads_get_one_tokenizer_and_equal_counts(tiny: Path) -> None:
    """Loading and counting from several threads at once is safe."""
    cache = Tokenizers()
    barrier = threading.Barrier(8)
    text = "the quick brown fox " * 500

    def work(_: int) -> tuple[int, int]:
        barrier.wait()
        tokenizer = cache.get(record("1" * 64, str(tiny)))
        return id(tokenizer), tokenizer.count(text)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(work, range(8)))) == 1


def test_a_broken_tokenizer_can_be_mended(tiny: Path) -> None:
    """A failed load is not remembered here."""
    cache = Tokenizers()
    (tiny / "tokenizer.json").rename(tiny / "away")
    with pytest.raises(ConfigError):
        cache.get(record("1" * 64, str(tiny)))
    (tiny / "away").rename(tiny / "tokenizer.json")
    assert cache.get(record("1" * 64, str(tiny))).exact


# ----------------------------------------------------------------------------------------------------------- real model

REFERENCE = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
result = []
for chat, text in json.load(sys.stdin):
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
    result.append([list(ids["input_ids"] if hasattr(ids, "keys") else ids), tokenizer(text)["input_ids"]])
print(json.dumps(result))
"""


@pytest.mark.engine
def test_smollm2_ids_are_those_of_transformers() -> None:
    """Chat and completion ids equal those of transformers' own template and tokenizer, over awkward texts."""
    directory = ensure_smollm2()
    texts = [
        "Hi",
        "  two  spaces\n\n\ttab",
        "1234567890 3.14",
        "日本語 😀 ünï",
        "<|im_start|>user\nnested<|im_end|>",
        "x" * 5000,
        "",
    ]
    chats = [[{"role": "user", "content": text}] for text in texts]
    chats[0] = [{"role": "system", "content": "Be brief."}, *chats[0], {"role": "assistant", "content": "Yo"}, *chats[1]]
    reference = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(directory)],
        input=json.dumps(list(zip(chats, texts, strict=True))),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    tokenizer = ModelTokenizer(directory)
    ours = [
        [
            tokenizer.prompts(Endpoint.CHAT, {"messages": chat})[0],
            tokenizer.prompts(Endpoint.COMPLETIONS, {"prompt": text})[0],
        ]
        for chat, text in zip(chats, texts, strict=True)
    ]
    assert ours == json.loads(reference.stdout.splitlines()[-1])
