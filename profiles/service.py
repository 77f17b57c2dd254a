"""``ModelService`` YAML: reading, checking, JSON Schema (PRO-1).

A file may hold several documents. Anything wrong is one ``ConfigError`` of one line: file, document, field, what is wrong,
and the remedy. Unknown fields, duplicate keys and YAML aliases are refused: each of them hides a mistake sooner or later.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import yaml

from profiles.sizes import parse_size
from subjects.errors import ConfigError
from subjects.messages import EngineType, Mode, Sla, SlaClass, StepCosts, Task

API_VERSION = "llm.serving/v1"
KIND = "ModelService"
FILE_BYTES_MAX = 1 << 20
DOCUMENTS_MAX = 256
ADAPTERS_LISTED_MAX = 256
"""Some 100 KB in a record, which also travels with each load."""
_DEPTH_MAX = 32

NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,46}[A-Za-z0-9])?$"
"""What clients write in ``model``; also a key of the registry."""
ALIAS_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._/:-]{0,126}[A-Za-z0-9])?$"
RESERVED_NAMES = frozenset({"auto"})
"""``auto`` asks the broker to choose a model (ING-5)."""

Dtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4"]
LoadDtype = Literal["auto", "float32", "bfloat16", "float16"]
KvCodec = Literal["none", "lossless", "fp8", "int4"]
"""As ``kvcache.codec.codecs`` has them."""
AdapterRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""The bounds that vLLM knows."""

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Alias = Annotated[str, msgspec.Meta(pattern=ALIAS_PATTERN)]
Tag = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,62}$")]
DeviceType = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
MemoryGb = Annotated[float, msgspec.Meta(gt=0, le=100_000)]
TokenSeconds = Annotated[float, msgspec.Meta(ge=1e-9, le=10)]
StepSeconds = Annotated[float, msgspec.Meta(ge=1e-9, le=60)]
PartSeconds = Annotated[float, msgspec.Meta(ge=0, le=10)]
SquareSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e-2)]
"""Seconds per input token; of a step; per request or token in a step; per square of input tokens. What is outside is a
mistake of units, and the arithmetic of the scheduler could overflow."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who the model is for clients."""

    name: Name
    aliases: Annotated[tuple[Alias, ...], msgspec.Meta(max_length=32)] = ()


class SlaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Targets; times in milliseconds."""

    p95_latency_ms: PositiveInt | None = None
    ttft_p95_ms: PositiveInt = 2000
    tpot_ms: PositiveInt = 100
    min_throughput_qps: NotNegative = 0.0
    max_error_rate: Share = 0.05

    def as_message(self) -> Sla:
        """The form that the registry carries."""
        return Sla(**msgspec.structs.asdict(self))


class CostsSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fitted times on one kind of device, in seconds; ``profiles.costs`` has the arithmetic."""

    prefill_token_s: TokenSeconds
    prefill_token2_s: SquareSeconds = 0.0
    step_const_s: StepSeconds
    step_request_s: PartSeconds = 0.0
    step_context_token_s: PartSeconds = 0.0

    def as_message(self) -> StepCosts:
        """The form that the registry carries."""
        return StepCosts(**msgspec.structs.asdict(self))


class Resources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the owner knows of the model's needs. All optional: what is absent is computed from the files or measured.

    ``gpus`` linked devices are spanned by one replica. ``costs`` are by kind of device, such as ``h100-80gb`` or ``cpu``
    (``carpool get devices`` shows the kinds), and win over what is measured there: leave them out unless you know better.
    ``carpool get costs`` shows what is gone by, ``carpool profile`` prints a measurement to paste.
    """

    baseline_memory_gb: MemoryGb | None = None
    compute_efficiency: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    latency_sensitivity: Share | None = None
    gpus: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    costs: dict[DeviceType, CostsSpec] = {}


REPLICAS_MAX = 10_000
"""Of one model; where its file says nothing it may have as many as fit."""


class Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the pool may treat the model. A model with a ``tenant`` shares devices only with models of that tenant."""

    supported_dtypes: Annotated[tuple[Dtype, ...], msgspec.Meta(max_length=8)] = ()
    allow_co_location: bool = True
    tenant: Name | None = None
    min_replicas: Count = 0
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)] = REPLICAS_MAX
    sla_class: SlaClass = msgspec.field(default=SlaClass.SILVER, name="class")
    tags: Annotated[tuple[Tag, ...], msgspec.Meta(max_length=64)] = ()
    quality_tier: Annotated[int, msgspec.Meta(ge=1, le=10)] = 1
    cost_weight: Positive = 1.0
    fallback: Name | None = None
    mode: Mode = Mode.ACT
    pinned: bool = False
    keep_s: Annotated[float, msgspec.Meta(ge=0, le=31_536_000)] | None = None
    max_wait_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 120.0
    queue_requests_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 512


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is run. ``kv_cache_bytes`` is a number of bytes or a size such as ``64MiB``; absent: computed."""

    type: EngineType = EngineType.VLLM
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.92
    block_size: Annotated[int, msgspec.Meta(ge=16, le=256, multiple_of=16)] = 32
    max_context_len: Annotated[int, msgspec.Meta(ge=16, le=2**31 - 1)] | None = None
    max_output_tokens_default: PositiveInt = 256
    warmup_tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 4
    kv_cache_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**53)] | Text | None = None
    dtype: LoadDtype = "auto"
    options: dict[Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")], str | int | float | bool] = {}


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter that clients name like a model.

    ``source`` is a directory (relative to this file) with ``adapter_config.json`` and ``adapter_model.safetensors``, or the
    id of one in the local Hugging Face cache; for ``openai_http`` the name that the server knows it by (absent: ``name``).
    """

    name: Name
    source: Text | None = None
    aliases: Annotated[tuple[Alias, ...], msgspec.Meta(max_length=32)] = ()


class KvSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of computed KV when its engine drops it, goes, or runs elsewhere too.

    ``reuse``: it is kept in its worker's host memory and on its disk, and other workers may fetch it. ``codec`` is how it is
    written to disk: ``none`` and ``lossless`` give the same bytes back; ``fp8`` and ``int4`` are smaller and may change a
    text whose beginning comes from disk, so they make the model another one. ``converted``, for ``kv_cache_dtype: fp8``: KV
    that the same files computed in a wider precision serves this model too, rounded to fp8. A text may differ from one
    whose beginning this model computed itself, so that it is another model too, and off unless it is asked for.
    """

    reuse: bool = True
    codec: KvCodec = "none"
    converted: bool = False


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``source`` is a directory (relative to this file), ``builtin:<model>``, or the base URL of a server.

    ``model`` is the model's own id, for ``openai_http`` the name that the server knows it by; absent: ``metadata.name``.
    ``tokenizer`` is a directory with tokenizer files, for openai_http and simulated. ``task`` is ``generate`` or ``embed``.
    ``adapters`` may change while the model runs. A vLLM replica is started for ``adapters_max`` of them at once (absent: 4
    where any are listed) with ranks up to ``adapters_rank_max``; whether there are any, and the rank, are part of the model.
    """

    model: Text | None = None
    source: Text | None = None
    tokenizer: Text | None = None
    task: Task = Task.GENERATE
    adapters: Annotated[tuple[AdapterSpec, ...], msgspec.Meta(max_length=ADAPTERS_LISTED_MAX)] = ()
    adapters_max: Annotated[int, msgspec.Meta(ge=0, le=256)] | None = None
    adapters_rank_max: AdapterRank = 16
    version: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "1"
    sla: SlaSpec = SlaSpec()
    resources: Resources = Resources()
    strategy: Strategy = Strategy()
    kv: KvSpec = KvSpec()
    engine: EngineSpec = EngineSpec()


class ModelService(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model as its owner describes it."""

    api_version: Literal["llm.serving/v1"] = msgspec.field(name="apiVersion")
    kind: Literal["ModelService"]
    metadata: Metadata
    spec: Spec = Spec()


# ------------------------------------------------------------------------------------------------------------- reading


def load_services(path: Path) -> list[ModelService]:
    """All services of one YAML file, in order.

    Raises:
        ConfigError: one line: file, document, field, what is wrong, remedy.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError(f"{_plain(path)}: no such file; check the path after -f") from None
    except IsADirectoryError:
        raise ConfigError(f"{_plain(path)}: is a directory; name one YAML file") from None
    except OSError as error:
        raise ConfigError(f"{_plain(path)}: cannot be read ({error.strerror}); check its permissions") from None
    return parse_services(data, str(path))


def parse_services(data: bytes, file: str = "<input>") -> list[ModelService]:
    """Like :func:`load_services`, for bytes already read. ``file`` names their origin in errors."""
    place = _plain(file)
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{place}: larger than {FILE_BYTES_MAX} bytes; split it into several files")
    services: list[ModelService] = []
    first_places: dict[str, str] = {}
    documents = 0
    for documents, document in enumerate(_documents(data, place), start=1):
        if documents > DOCUMENTS_MAX:
            raise ConfigError(f"{place}: more than {DOCUMENTS_MAX} documents; split it into several files")
        if document is None:
            continue  # an empty part between two '---' lines
        at = f"{place}: document {documents}"
        service = _service(document, at)
        for name in _names(service):
            if name in first_places:
                raise ConfigError(f"{at}: metadata: the name {name!r} is already used in {first_places[name]}; rename one")
            first_places[name] = f"document {documents}"
        services.append(service)
    if not services:
        raise ConfigError(f"{place}: no document found; start with 'apiVersion: {API_VERSION}' and 'kind: {KIND}'")
    return services


def _names(service: ModelService) -> Iterable[str]:
    """All names by which clients may ask for the model or one of its adapters."""
    yield from (service.metadata.name, *service.metadata.aliases)
    for adapter in service.spec.adapters:
        yield from (adapter.name, *adapter.aliases)


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of one document, generated from the structs, for editors."""
    schema = msgspec.json.schema(ModelService)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": KIND, **schema}


# ------------------------------------------------------------------------------------------------------------ the parts


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without aliases, duplicate keys and bottomless nesting, and with ``2e-5`` as a number.

    PyYAML follows YAML 1.1, where that is text; small times are best written so, and JSON and YAML 1.2 read it as a number.
    """

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.events.AliasEvent):
            raise _refused(f"alias '*{event.anchor}' is not accepted; write the value out", event)
        if self.depth > _DEPTH_MAX:
            raise _refused(f"nested too deeply; a {KIND} has at most 4 levels", event)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in getattr(node, "value", ()):
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refused(f"the key {_short(key)} is not text; put it in quotes", key_node)
            if key in seen:
                raise _refused(f"duplicate key {_short(key)}; remove one of the two", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _refused(problem: str, at: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _documents(data: bytes, place: str) -> Iterable[Any]:
    try:
        loader = _Loader(data)
        try:
            while loader.check_data():  # type: ignore[no-untyped-call]
                yield loader.get_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f": line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or error.context or "not YAML"
        remedy = "" if ";" in problem else f"; {_syntax_remedy(problem)}"
        raise ConfigError(f"{place}{where}: {_plain(problem)}{remedy}") from None
    except (yaml.YAMLError, UnicodeError):
        raise ConfigError(f"{place}: not YAML text in UTF-8; save the file as plain UTF-8 text") from None
    except (ValueError, OverflowError) as error:  # for example the date 2024-13-45, or a number of 5,000 digits
        raise ConfigError(f"{place}: a value cannot be read ({_plain(error)}); put it in quotes if it is text") from None


def _syntax_remedy(problem: str) -> str:
    if "\\t" in problem or "\t" in problem:
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return "check the indentation, and put text that holds ': ' in quotes"
    if "2002:merge'" in problem:
        return "'<<' is not accepted, write the fields out"
    if "for the tag" in problem:
        return "remove the '!' tag"
    return "check the indentation and the quotes of this line"


def _service(document: Any, at: str) -> ModelService:
    if not isinstance(document, dict):
        text = f"expected fields such as 'apiVersion:', got {_kind(document)}; see ops/examples for a start"
        raise ConfigError(f"{at}: {text}")
    _check_values(document, "", at)
    # These two come first: of a file of another kind or version every field would be wrong.
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if document.get(field) != wanted:
            got = f"got {_short(document[field])}" if field in document else "it is missing"
            raise ConfigError(f"{at}: {field}: {got}; write '{field}: {wanted}'")
    try:
        service = msgspec.convert(document, ModelService, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{at}: {_explain(str(error), document)}") from None
    for field, text in _faults(service):
        raise ConfigError(f"{at}: {field}: {text}")
    return service


def _check_values(value: Any, field: str, at: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_values(item, f"{field}.{_plain(key)}" if field else _plain(key), at)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_values(item, f"{field}[{index}]", at)
    elif isinstance(value, str):
        # Options may hold whole texts, such as a chat template.
        text = re.sub(r"[\n\t]", "", value) if field.startswith("spec.engine.options.") else value
        if not text.isprintable():
            raise ConfigError(f"{at}: {field}: holds a line break or control character; write plain text on one line")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{at}: {field}: {value} is not a number one can use; write a finite number")
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        raise ConfigError(f"{at}: {field}: the number has over 63 bits; write a smaller one")
    elif not isinstance(value, int | float | bool | None):
        raise ConfigError(f"{at}: {field}: YAML reads this as {_kind(value)}; put it in quotes if it is text")


def _faults(service: ModelService) -> Iterator[tuple[str, str]]:
    """What breaks the rules that span fields: the field, and what is wrong with the remedy."""
    name, spec = service.metadata.name, service.spec
    engine, strategy = spec.engine, spec.strategy
    for field, names in (
        ("metadata.name", (name,)),
        ("metadata.aliases", service.metadata.aliases),
        *((f"spec.adapters[{index}]", (each.name, *each.aliases)) for index, each in enumerate(spec.adapters)),
    ):
        for one in names:
            if one.lower() in RESERVED_NAMES:
                yield field, f"{one!r} is reserved (it lets the broker choose); choose another name"
    yield from _adapter_faults(service)
    if strategy.min_replicas > strategy.max_replicas:
        text = f"{strategy.min_replicas} is above max_replicas {strategy.max_replicas}; lower it or raise max_replicas"
        yield "spec.strategy.min_replicas", text
    if strategy.fallback in (name, *service.metadata.aliases):
        yield "spec.strategy.fallback", "names the model itself; name another model or remove the field"
    if engine.kv_cache_bytes is not None:
        try:
            parse_size(engine.kv_cache_bytes)
        except ValueError as error:
            yield "spec.engine.kv_cache_bytes", _plain(error)
    for option in engine.options:
        if option in ("api_key", "token", "password", "authorization"):
            text = (
                "secrets do not belong into this file; put the key into an environment variable and name it in api_key_env"
            )
            yield f"spec.engine.options.{option}", text
    if engine.type is EngineType.OPENAI_HTTP:
        if spec.source is None or re.match(r"https?://[^/\s]", spec.source) is None:
            yield "spec.source", "must be the server's base URL for openai_http, such as http://127.0.0.1:8080/v1"
        elif re.match(r"https?://[^/]*@", spec.source):
            yield "spec.source", "holds a user or password; put the key into a variable named in options.api_key_env"
        if spec.resources.gpus > 1:
            yield "spec.resources.gpus", "is not for openai_http, whose server has its own devices; remove the field"
        if spec.kv != KvSpec():
            yield "spec.kv", "is not for openai_http, whose server keeps its own KV; remove the field"
        if engine.max_context_len is None:
            text = "is needed for openai_http; write the longest context the server takes"
            yield "spec.engine.max_context_len", text
    if spec.kv.converted:
        if engine.type is not EngineType.VLLM or engine.options.get("kv_cache_dtype") not in ("fp8", "fp8_e4m3"):
            text = "is for vllm with a cache in fp8; add engine.options.kv_cache_dtype: fp8 or remove the field"
            yield "spec.kv.converted", text
        if engine.options.get("calculate_kv_scales"):
            text = "has no scales, and calculate_kv_scales makes each cache its own; remove one of the two"
            yield "spec.kv.converted", text
    if engine.type is EngineType.VLLM:
        if spec.source is None:
            yield "spec.source", "is missing; name the model's directory or builtin:smollm2-135m-instruct"
        if spec.tokenizer is not None:
            yield "spec.tokenizer", "is not for vllm, which reads the tokenizer of the source; remove the field"
        if "://" in (spec.source or ""):
            server = "for an OpenAI server write engine.type: openai_http"
            yield "spec.source", f"is a URL; {server}, else name a downloaded model's directory"


def _adapter_faults(service: ModelService) -> Iterator[tuple[str, str]]:
    spec = service.spec
    seen = {service.metadata.name, *service.metadata.aliases}
    for index, adapter in enumerate(spec.adapters):
        field = f"spec.adapters[{index}]"
        for one in (adapter.name, *adapter.aliases):
            if one in seen:
                yield field, f"the name {one!r} is already used for this model; choose another name"
            seen.add(one)
        if spec.engine.type is EngineType.VLLM:
            if adapter.source is None:
                yield f"{field}.source", "is missing; name the adapter's directory"
            elif "://" in adapter.source:
                yield f"{field}.source", "is a URL; download the adapter and name its directory"
    if spec.adapters and spec.adapters_max == 0:
        yield "spec.adapters_max", "is 0, but there are adapters; raise it or remove the adapters"
    if spec.engine.type is EngineType.OPENAI_HTTP and spec.adapters_max is not None:
        yield "spec.adapters_max", "is not for openai_http, whose server loads its adapters; remove the field"
    for option in spec.engine.options:
        if option == "enable_lora" or option.startswith(("max_lora", "max_cpu_lora")):
            yield f"spec.engine.options.{option}", "follows from spec.adapters_max and adapters_rank_max; remove it"


_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `(?P<path>(?:key in )?\$.*)`)?", re.DOTALL)
_ALLOWED: dict[str, str] = {
    "strategy.class": ", ".join(item.value for item in SlaClass),
    "strategy.mode": ", ".join(item.value for item in Mode),
    "engine.type": ", ".join(item.value for item in EngineType),
    "task": ", ".join(item.value for item in Task),
    "engine.dtype": ", ".join(get_args(LoadDtype)),
    "supported_dtypes": ", ".join(get_args(Dtype)),
    "kv.codec": ", ".join(get_args(KvCodec)),
    "adapters_rank_max": ", ".join(str(rank) for rank in get_args(AdapterRank)),
}


def _explain(text: str, document: dict[str, Any]) -> str:
    """msgspec's message as ``field: what; remedy``."""
    match = _MESSAGE.fullmatch(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    field = path.removeprefix("key in ").removeprefix("$").removeprefix(".")
    prefix = f"{field}: " if field else ""
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        key = unknown[1]
        known = _known_fields(field)
        near = difflib.get_close_matches(key, known, n=1)
        remedy = f"did you mean '{near[0]}'?" if near else f"known fields here: {', '.join(known)}"
        return f"{prefix}unknown field {_short(key)}; {remedy}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        place = f"{field}.{missing[1]}" if field else missing[1]
        return f"{place}: is missing; add the line '{missing[1]}: ...'"
    what = what[:1].lower() + what[1:]
    for suffix, allowed in _ALLOWED.items():
        if re.sub(r"\[\d+\]$", "", field).endswith(suffix):
            return f"{prefix}{_plain(what)}; use one of: {allowed}"
    for formal, common in (("`object`", "a mapping of fields"), ("`array`", "a list"), ("`null`", "nothing")):
        what = what.replace(formal, common)
    if "matching regex" in what and not field:
        # msgspec tells no path for a key; options and costs are the only mappings with free keys.
        if "._-" in what:
            return "spec.resources.costs: not a kind of device; use a name that `carpool get devices` shows, such as cpu"
        return "spec.engine.options: not a valid option name; use lower-case letters, digits and '_', such as max_num_seqs"
    if "matching regex" in what:
        what = "not a valid name"
        characters = "'.', '_' or '-'" if field.endswith(("name", "fallback")) else "'.', '_', '-', ':' or '/'"
        remedy = f"use letters, digits, {characters}, with a letter or digit first, and at most 48 characters"
    elif "expected `str" in what and re.search(r"got `(int|float|bool)`", what):
        remedy = "put the value in quotes"
    elif "got nothing" in what:
        remedy = "give it a value or remove the line"
    elif "got `str`" in what:
        remedy = "write the value without quotes and without a unit"
    elif re.search(r"[<>]|multiple of", what):
        remedy = "write a number in that range"
    else:
        remedy = "correct the value"
    return f"{prefix}{_plain(what)}; {remedy}"


def _known_fields(field: str) -> list[str]:
    """Of the struct at ``field``, through mappings (``costs[...]``) and lists (``adapters[0]``)."""
    kind: Any = ModelService
    for part in filter(None, field.replace("[...]", "[*]").split(".")):
        name, _, index = part.partition("[")
        kind = {info.encode_name: info.type for info in msgspec.structs.fields(kind)}[name]
        if index:
            kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
            kind = get_args(kind)[1 if get_origin(kind) is dict else 0]
    return [info.encode_name for info in msgspec.structs.fields(kind)]


def _kind(value: Any) -> str:
    kinds = {dict: "a mapping", list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false"}
    return "nothing" if value is None else kinds.get(type(value), f"a {type(value).__name__}")


def _plain(value: object) -> str:
    """One printable line: what a user wrote must not break the line or drive a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(value))


def _short(value: object) -> str:
    text = _plain(repr(value) if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
