"""ModelService YAML: what is accepted, and one line for everything that is not (PRO-1, PAINS N)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from jsonschema import Draft202012Validator

from kvcache.codec.codecs import CODECS
from profiles.service import KvCodec, Spec, json_schema, load_services, parse_services
from profiles.sizes import parse_size
from subjects.errors import ConfigError
from subjects.messages import EngineType, Mode, SlaClass

HEAD = "apiVersion: llm.serving/v1\nkind: ModelService\nmetadata: {name: a}\n"
EXAMPLES = Path(__file__).parents[2] / "ops" / "examples"


def _spec(text: str) -> str:
    return HEAD + f"spec: {{source: x, {text}}}\n"


# Each row: a name, the file's text, and the parts that its one line must have: the place, what is wrong, the remedy.
BAD: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("kv codec", HEAD + "spec: {source: x, kv: {codec: zip}}\n", ("spec.kv.codec", "use one of: none, lossless, fp8, int4")),
    (
        "kv field",
        HEAD + "spec: {source: x, kv: {codek: fp8}}\n",
        ("spec.kv: unknown field 'codek'", "did you mean 'codec'?"),
    ),
    ("kv converted, of no fp8", _spec("kv: {converted: true}"), ("spec.kv.converted: is for vllm", "kv_cache_dtype: fp8")),
    (
        "kv converted, of no vllm",
        _spec("kv: {converted: true}, engine: {type: simulated, options: {kv_cache_dtype: fp8}}"),
        ("spec.kv.converted: is for vllm", "remove the field"),
    ),
    (
        "kv converted, with scales",
        _spec("kv: {converted: true}, engine: {options: {kv_cache_dtype: fp8, calculate_kv_scales: true}}"),
        ("spec.kv.converted: has no scales", "remove one of the two"),
    ),
    (
        "kv of a server",
        HEAD + "spec: {source: 'http://h/v1', kv: {reuse: false}, engine: {type: openai_http, max_context_len: 64}}\n",
        ("spec.kv: is not for openai_http", "remove the field"),
    ),
    ("empty file", "", ("no document found", "apiVersion: llm.serving/v1")),
    ("only comments", "# nothing\n---\n---\n", ("no document found",)),
    ("a list", "- 1\n", ("document 1: expected fields", "got a list")),
    ("plain text", "hello\n", ("got text",)),
    ("binary", b"\x00\x01\x80", ("UTF-8",)),
    ("latin-1", HEAD.encode() + b"spec: {source: \xe9}\n", ("UTF-8",)),
    ("missing apiVersion", "kind: ModelService\n", ("apiVersion: it is missing", "write 'apiVersion: llm.serving/v1'")),
    ("other apiVersion", "apiVersion: llm.serving/v2\nkind: ModelService\n", ("'llm.serving/v2'", "llm.serving/v1")),
    ("other kind", "apiVersion: llm.serving/v1\nkind: Deployment\n", ("kind: got 'Deployment'", "kind: ModelService")),
    ("no metadata", "apiVersion: llm.serving/v1\nkind: ModelService\n", ("metadata: is missing",)),
    ("no name", HEAD.replace("name: a", ""), ("metadata.name: is missing", "add the line")),
    ("name with space", HEAD.replace("name: a", "name: a b"), ("metadata.name: not a valid name", "use letters")),
    ("name with newline", HEAD.replace("name: a", 'name: "a\\n"'), ("metadata.name", "control character")),
    ("name too long", HEAD.replace("name: a", f"name: {'a' * 49}"), ("metadata.name", "48 characters")),
    ("name that YAML reads as a boolean", HEAD.replace("name: a", "name: no"), ("got `bool`", "put the value in quotes")),
    ("reserved name", HEAD.replace("name: a", "name: auto"), ("metadata.name: 'auto' is reserved",)),
    ("bad alias", HEAD.replace("name: a", "name: a, aliases: ['b c']"), ("metadata.aliases[0]: not a valid name",)),
    (
        "unknown field, near a known one",
        HEAD + "spec: {sorce: x}\n",
        ("spec: unknown field 'sorce'", "did you mean 'source'?"),
    ),
    ("unknown field", _spec("sla: {zzz: 1}"), ("spec.sla: unknown field 'zzz'", "known fields here: p95_latency_ms")),
    ("unknown field on top", HEAD + "status: {}\n", ("unknown field 'status'", "known fields here")),
    ("spec is nothing", HEAD + "spec:\n", ("spec: expected a mapping of fields, got nothing",)),
    ("spec is a list", HEAD + "spec: []\n", ("spec: expected a mapping of fields, got a list",)),
    ("text for a number", _spec("sla: {ttft_p95_ms: '5'}"), ("spec.sla.ttft_p95_ms: expected `int`, got `str`", "quotes")),
    ("fraction for a whole number", _spec("sla: {ttft_p95_ms: 2.5}"), ("spec.sla.ttft_p95_ms",)),
    ("boolean for a number", _spec("engine: {max_num_seqs: yes}"), ("spec.engine.max_num_seqs", "got `bool`")),
    ("negative", _spec("sla: {tpot_ms: -5}"), ("spec.sla.tpot_ms: expected `int` >= 1",)),
    ("zero replicas at most", _spec("strategy: {max_replicas: 0}"), ("spec.strategy.max_replicas: expected `int` >= 1",)),
    ("NaN", _spec("sla: {min_throughput_qps: .nan}"), ("spec.sla.min_throughput_qps: nan", "finite")),
    ("infinity", _spec("strategy: {max_wait_s: .inf}"), ("spec.strategy.max_wait_s: inf", "finite")),
    ("a share above 1", _spec("sla: {max_error_rate: 5}"), ("spec.sla.max_error_rate: expected `float` <= 1",)),
    ("efficiency above 1", _spec("resources: {compute_efficiency: 1.5}"), ("spec.resources.compute_efficiency",)),
    ("costs without a constant", _spec("resources: {costs: {cpu: {prefill_token_s: 1}}}"), ("step_const_s: is missing",)),
    (
        "a cost that takes no time",
        _spec("resources: {costs: {cpu: {prefill_token_s: 0, step_const_s: 1}}}"),
        ("spec.resources.costs[...].prefill_token_s: expected `float` >= 1e-09", "in that range"),
    ),
    (
        "an unknown cost",
        _spec("resources: {costs: {cpu: {prefill_token_s: 1, step_const_s: 1, step_s: 1}}}"),
        ("spec.resources.costs[...]: unknown field 'step_s'", "did you mean 'step_const_s'?"),
    ),
    (
        "costs of no kind",
        _spec("resources: {costs: {'H100 80': {prefill_token_s: 1, step_const_s: 1}}}"),
        ("spec.resources.costs: not a kind of device", "carpool get devices"),
    ),
    ("no devices", _spec("resources: {gpus: 0}"), ("spec.resources.gpus: expected `int` >= 1",)),
    (
        "devices of a server",
        HEAD + "spec: {source: 'http://h/v1', resources: {gpus: 2}, engine: {type: openai_http, max_context_len: 99}}\n",
        ("spec.resources.gpus: is not for openai_http", "remove the field"),
    ),
    ("over 63 bits", _spec(f"sla: {{tpot_ms: {10**30}}}"), ("spec.sla.tpot_ms", "63 bits")),
    ("5,000 digits", _spec(f"sla: {{tpot_ms: {'9' * 5000}}}"), ("cannot be read",)),
    (
        "min above max",
        _spec("strategy: {min_replicas: 3, max_replicas: 1}"),
        ("min_replicas: 3 is above max_replicas 1", "lower it or raise"),
    ),
    ("unknown class", _spec("strategy: {class: platinum}"), ("spec.strategy.class", "gold, silver, bronze, batch")),
    ("unknown mode", _spec("strategy: {mode: maybe}"), ("spec.strategy.mode", "observe, advise, act")),
    ("unknown engine", _spec("engine: {type: trt}"), ("spec.engine.type", "vllm, openai_http, simulated")),
    ("unknown dtype", _spec("engine: {dtype: fp64}"), ("spec.engine.dtype", "auto, float32, bfloat16, float16")),
    ("unknown supported dtype", _spec("strategy: {supported_dtypes: [bf16]}"), ("supported_dtypes[0]", "bfloat16")),
    ("fallback to itself", _spec("strategy: {fallback: a}"), ("spec.strategy.fallback: names the model itself",)),
    ("block size", _spec("engine: {block_size: 33}"), ("spec.engine.block_size", "multiple of 16")),
    (
        "bad size unit",
        _spec("engine: {kv_cache_bytes: 64MiBs}"),
        ("spec.engine.kv_cache_bytes: '64MiBs' is not a size", "GiB"),
    ),
    ("not a size", _spec("engine: {kv_cache_bytes: lots}"), ("spec.engine.kv_cache_bytes", "512MiB")),
    ("size of zero", _spec("engine: {kv_cache_bytes: 0MiB}"), ("spec.engine.kv_cache_bytes", "at least 1 byte")),
    ("bad option name", _spec("engine: {options: {'a b': 1}}"), ("spec.engine.options", "option name")),
    ("option that is a list", _spec("engine: {options: {a: [1]}}"), ("spec.engine.options", "got a list")),
    ("a key in the file", _spec("engine: {options: {api_key: sk-1}}"), ("options.api_key", "api_key_env")),
    ("unquoted version", _spec("version: 1.10"), ("spec.version: expected `str`, got `float`", "quotes")),
    ("a date", _spec("version: 2024-01-01"), ("spec.version: YAML reads this as a date", "quotes")),
    ("an impossible date", _spec("version: 2024-13-45"), ("cannot be read",)),
    ("no source", HEAD + "spec: {}\n", ("spec.source: is missing", "builtin:")),
    (
        "URL for vllm",
        HEAD + "spec: {source: 's3://b/m'}\n",
        ("spec.source: is a URL", "engine.type: openai_http", "directory"),
    ),
    ("no URL for a server", _spec("engine: {type: openai_http}"), ("spec.source", "base URL")),
    ("server without context", HEAD + "spec: {source: 'http://h/v1', engine: {type: openai_http}}\n", ("max_context_len",)),
    ("password in a URL", HEAD + "spec: {source: 'http://u:p@h/v1', engine: {type: openai_http}}\n", ("user or password",)),
    ("unknown task", _spec("task: rank"), ("spec.task", "generate, embed")),
    ("tokenizer for vllm", _spec("tokenizer: t"), ("spec.tokenizer", "remove the field")),
    ("duplicate key", HEAD + "kind: ModelService\n", ("line 4, column 1: duplicate key 'kind'", "remove one")),
    ("duplicate key below", _spec("source: y"), ("line 4", "duplicate key 'source'")),
    (
        "same name twice",
        HEAD + "spec: {source: x}\n---\n" + HEAD + "spec: {source: y}\n",
        ("document 2", "already used in document 1"),
    ),
    ("second document wrong", HEAD + "spec: {source: x}\n---\n" + HEAD + "spec: {z: y}\n", ("document 2: spec: unknown",)),
    ("alias", HEAD + "spec: {source: &a x, model: *a}\n", ("alias '*a' is not accepted", "write the value out")),
    ("merge key", HEAD + "spec: {<<: {source: x}}\n", ("'<<' is not accepted",)),
    ("tab", HEAD + "spec:\n\tsource: x\n", ("line 5, column 1", "spaces, not tabs")),
    ("colon in text", HEAD + "spec: {source: x}\nb: c: d\n", ("line 5", "mapping values are not allowed", "quotes")),
    ("unclosed brace", HEAD + "spec: {source: x\n", ("line", "check the indentation and the quotes")),
    ("unclosed quote", HEAD + "spec: {source: 'x}\n", ("line",)),
    ("python tag", HEAD + "spec: !!python/object/apply:os.system [x]\n", ("line 4", "python/object", "remove the '!' tag")),
    ("key that is no text", HEAD + "spec: {source: x, 1: 2}\n", ("the key 1 is not text", "quotes")),
    ("key that is a list", HEAD + "spec: {source: x, [1]: 2}\n", ("is not text",)),
    ("very deep", HEAD + "spec: " + "[" * 1500 + "\n", ("nested too deeply",)),
    ("deep", HEAD + "spec: " + "[" * 40 + "]" * 40 + "\n", ("nested too deeply",)),
    ("too large", HEAD + "# " + "x" * (1 << 20), ("larger than 1048576 bytes", "split it")),
    ("escape sequence", _spec('model: "\\e[31mred"'), ("spec.model", "control character")),
    ("set", HEAD + "spec: !!set {source}\n", ()),
    ("bytes", _spec("model: !!binary aGk="), ("spec.model: YAML reads this as",)),
    ("adapter without a name", _spec("adapters: [{source: x}]"), ("spec.adapters[0].name: is missing",)),
    ("adapter without a source", _spec("adapters: [{name: b}]"), ("spec.adapters[0].source: is missing",)),
    ("adapter's field", _spec("adapters: [{name: a, sorce: x}]"), ("spec.adapters[0]: unknown", "did you mean 'source'")),
    (
        "adapter twice",
        _spec("adapters: [{name: b, source: x}, {name: b, source: y}]"),
        ("spec.adapters[1]", "'b' is already"),
    ),
    (
        "adapter like its model",
        _spec("adapters: [{name: b, source: x, aliases: [a]}]"),
        ("spec.adapters[0]", "'a' is already"),
    ),
    ("adapter called auto", _spec("adapters: [{name: Auto, source: x}]"), ("spec.adapters[0]", "reserved")),
    ("adapter by URL", _spec("adapters: [{name: b, source: 'https://x/y'}]"), ("spec.adapters[0].source: is a URL",)),
    ("adapters and none", _spec("adapters_max: 0, adapters: [{name: b, source: x}]"), ("spec.adapters_max: is 0",)),
    ("an odd rank", _spec("adapters_rank_max: 12"), ("spec.adapters_rank_max", "use one of: 1, 8, 16")),
    ("LoRA by options", _spec("engine: {options: {max_loras: 3}}"), ("spec.engine.options.max_loras", "spec.adapters_max")),
]


@pytest.mark.parametrize(("text", "parts"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_configuration(text: str | bytes, parts: tuple[str, ...]) -> None:
    """Everything wrong is a ConfigError of one printable line that names the file, the place and the remedy."""
    with pytest.raises(ConfigError) as caught:
        parse_services(text if isinstance(text, bytes) else text.encode(), "dir/models.yaml")
    line = str(caught.value)
    assert line.startswith("dir/models.yaml: ")
    assert line.isprintable()
    assert len(line) < 400
    for part in parts:
        assert part in line


@pytest.mark.parametrize("value", ["1.0e+300", "1.7e308", "1e-320", "-1", "61", "1e12", ".nan", ".inf"])
@pytest.mark.parametrize("field", ["prefill_token_s", "step_const_s"])
def test_costs_of_no_device_are_refused(field: str, value: str) -> None:
    """A cost in the wrong unit, or of no number, is told with its field and bound before the scheduler counts with it."""
    costs = ", ".join(f"{name}: {value if name == field else 1}" for name in ("prefill_token_s", "step_const_s"))
    with pytest.raises(ConfigError, match=rf"{field}.*(1e-09|<= [16]0|finite)"):
        parse_services(_spec(f"resources: {{costs: {{cpu: {{{costs}}}}}}}").encode())


@pytest.mark.parametrize(
    ("field", "bound"), [("prefill_token2_s", "0.01"), ("step_request_s", "10"), ("step_context_token_s", "10")]
)
def test_parts_of_a_step_have_bounds(field: str, bound: str) -> None:
    """The bound itself is accepted; more, less than 0, and numbers that would overflow are not."""
    text = "resources: {costs: {cpu: {prefill_token_s: 10, step_const_s: 60, %s: %s}}}"
    assert parse_services(_spec(text % (field, bound)).encode())
    for value in ("1.7e308", "1.0e+300", "10.1", "-1e-9"):
        with pytest.raises(ConfigError, match=rf"{field}: expected `float` [<>]= {bound if value[0] == '1' else 0}"):
            parse_services(_spec(text % (field, value)).encode())


@pytest.mark.parametrize("value", ["1e300", "1e12", "100001", "0", "-1", ".nan"])
def test_memory_of_no_device_is_refused(value: str) -> None:
    """Gigabytes written in bytes are told before they become a size that no pool has."""
    assert parse_services(_spec("resources: {baseline_memory_gb: 100000}").encode())
    with pytest.raises(ConfigError, match=r"spec\.resources\.baseline_memory_gb"):
        parse_services(_spec(f"resources: {{baseline_memory_gb: {value}}}").encode())


def test_too_many_documents() -> None:
    """The number of documents is bounded."""
    text = "---\n".join(HEAD.replace("name: a", f"name: a{index}") + "spec: {source: x}\n" for index in range(257))
    with pytest.raises(ConfigError, match="more than 256 documents"):
        parse_services(text.encode())


def test_alias_bomb_is_refused_at_once() -> None:
    """A file whose aliases would unfold to a billion entries costs no time and no memory."""
    layers = ["a: &a [x,x,x,x,x,x,x,x,x,x]"]
    layers += [f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]" for i in range(9)]
    started_s = time.monotonic()
    with pytest.raises(ConfigError, match="alias"):
        parse_services("\n".join(layers).encode())
    assert time.monotonic() - started_s < 5


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a directory and a file without permission are told apart."""
    with pytest.raises(ConfigError, match=r"no\.yaml: no such file"):
        load_services(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_services(tmp_path)
    closed = tmp_path / "closed.yaml"
    closed.write_text(HEAD)
    closed.chmod(0)
    if not os.access(closed, os.R_OK):
        with pytest.raises(ConfigError, match="check its permissions"):
            load_services(closed)


FULL = """
apiVersion: llm.serving/v1
kind: ModelService
metadata: {name: qwen2.5-7b, aliases: [Qwen/Qwen2.5-7B]}
spec:
  model: Qwen/Qwen2.5-7B
  source: ./qwen
  version: "1.10"
  sla: {p95_latency_ms: 9000, ttft_p95_ms: 1500, tpot_ms: 50, min_throughput_qps: 2, max_error_rate: 0.01}
  resources: {baseline_memory_gb: 15.2, compute_efficiency: 0.7, latency_sensitivity: 0.9}
  strategy:
    supported_dtypes: [bfloat16, fp8]
    allow_co_location: false
    min_replicas: 1
    max_replicas: 4
    class: gold
    tags: [chat, code]
    quality_tier: 5
    cost_weight: 2.5
    fallback: qwen-small
    mode: advise
    pinned: true
    max_wait_s: 30
    queue_requests_max: 64
  kv: {reuse: true, codec: lossless}
  engine:
    type: vllm
    max_num_seqs: 64
    gpu_memory_utilization: 0.85
    block_size: 64
    max_context_len: 8192
    max_output_tokens_default: 512
    warmup_tokens: 8
    kv_cache_bytes: 2GiB
    dtype: bfloat16
    options: {quantization: awq, enforce_eager: true, seed: 3, swap_space: 0.5}
"""


def test_every_field_is_read() -> None:
    """All fields of PRO-1 arrive with their values."""
    service = parse_services(FULL.encode())[0]
    spec = service.spec
    assert (service.metadata.name, service.metadata.aliases) == ("qwen2.5-7b", ("Qwen/Qwen2.5-7B",))
    assert (spec.version, spec.sla.p95_latency_ms, spec.resources.compute_efficiency) == ("1.10", 9000, 0.7)
    assert (spec.strategy.sla_class, spec.strategy.mode, spec.strategy.fallback) == (
        SlaClass.GOLD,
        Mode.ADVISE,
        "qwen-small",
    )
    assert (spec.kv.reuse, spec.kv.codec) == (True, "lossless")
    assert spec.engine.options == {"quantization": "awq", "enforce_eager": True, "seed": 3, "swap_space": 0.5}


def test_defaults() -> None:
    """A service of two lines is enough; its defaults are those of PRO-1."""
    spec = parse_services((HEAD + "spec: {source: x}\n").encode())[0].spec
    assert (spec.sla.ttft_p95_ms, spec.engine.gpu_memory_utilization, spec.engine.block_size) == (2000, 0.92, 32)
    assert (spec.engine.type, spec.strategy.mode) == (EngineType.VLLM, Mode.ACT)
    assert (spec.kv.reuse, spec.kv.codec) == (True, "none")


def test_a_chat_template_may_have_lines() -> None:
    """Options may hold whole texts; other fields are one line."""
    text = _spec('engine: {options: {chat_template: "a\\nb"}}')
    assert parse_services(text.encode())[0].spec.engine.options == {"chat_template": "a\nb"}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64MiB", 64 << 20),
        ("2 GB", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        ("17", 17),
        (17, 17),
        ("1TiB", 1 << 40),
        ("5KB", 5000),
        ("1.5gb", 1_500_000_000),
        (" 7 kib ", 7168),
        ("9007199254740991", 2**53 - 1),
    ],
)
def test_sizes(text: str | int, size_bytes: int) -> None:
    """Units are binary or decimal as written, in any case."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e3", "4 Gi B", "0x10", "１GiB", "nan", "1T", "64MiBs", "0.5", -1, 2**53]
)
def test_what_is_no_size(text: str | int) -> None:
    """Anything else is refused with the remedy."""
    with pytest.raises(ValueError, match=r"write it like 4GiB or 512MiB$"):
        parse_size(text)


# ------------------------------------------------------------------------------------------------------------- schema


def test_the_codecs_of_the_file_are_those_of_the_tiers() -> None:
    """What may be written is what can be decoded."""
    assert get_args(KvCodec) == CODECS


def _validator() -> Draft202012Validator:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_follow_the_schema(path: Path) -> None:
    """Every shipped example is valid, for the loader and for an editor that uses the schema."""
    assert load_services(path)
    for document in yaml.safe_load_all(path.read_text()):
        _validator().validate(document)


def test_there_are_examples() -> None:
    """The test above has something to look at."""
    assert {path.name for path in EXAMPLES.glob("*.yaml")} >= {
        "smollm2.yaml",
        "tiny-a.yaml",
        "tiny-b.yaml",
        "tools.yaml",
        "embed.yaml",
        "server.yaml",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"sorce": "x"}},
        {"kind": "Deployment"},
        {"spec": {"source": "x", "sla": {"tpot_ms": -1}}},
        {"spec": {"source": "x", "strategy": {"class": "platinum"}}},
        {"metadata": {"name": "a b"}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(change: dict[str, Any]) -> None:
    """The published schema is no weaker than the loader for fields of one value."""
    document = {"apiVersion": "llm.serving/v1", "kind": "ModelService", "metadata": {"name": "a"}, "spec": {"source": "x"}}
    assert _validator().is_valid(document)
    assert not _validator().is_valid(document | change)
    with pytest.raises(ConfigError):
        parse_services(yaml.safe_dump(document | change).encode())


def test_schema_names_every_field() -> None:
    """The schema is generated from the structs, so it follows them."""
    assert set(json_schema()["$defs"]["Spec"]["properties"]) == set(Spec.__struct_fields__)
