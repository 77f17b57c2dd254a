"""A checked ``ModelService`` plus the files on disk become a ``ModelRecord``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from profiles import adapters, capacity, hashing
from profiles.deployment import PARSING_OPTIONS, runs_with, with_deployment
from profiles.paths import models_dir
from profiles.service import ModelService
from profiles.sizes import parse_size
from subjects.errors import ConfigError, EngineError
from subjects.ids import ModelHash
from subjects.messages import Adapter, EngineType, ModelRecord, Task

Progress = Callable[[str], None]

BUILTIN_PREFIX = "builtin:"
_TINY = re.compile(r"tiny-(\d{1,9})")
_SIMULATED_WEIGHTS_BYTES = 1 << 30
_SIMULATED_KV_BYTES_PER_TOKEN = 16 << 10
_SIMULATED_CONTEXT_LEN = 8192
_OPTIONS_WITHOUT_KV = ("enable_auto_tool_choice", "enforce_eager", "max_num_batched_tokens", *PARSING_OPTIONS)
_OPTIONS_NAMED = ("chat_template", "kv_cache_dtype")
"""Engine options that change no KV, and that its signature names; models that differ in any other do not share theirs."""
_KV_SCALES = ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale", "v_proj.output_scale", "qkv_proj.output_scale")
"""Ends of the names under which vLLM finds a cache's scales in a model's files."""
_SIZE_OPTIONS = ("weights_bytes", "kv_bytes_per_token", "overhead_bytes")
"""Options of a simulated service that size its record; the engine never sees them."""


def build_record(service: ModelService, base_dir: Path, *, progress: Progress | None = None) -> ModelRecord:
    """The record of ``service``; relative sources are below ``base_dir`` (the folder of the YAML file).

    A ``builtin:`` source is made or fetched when it is not in the cache yet; ``progress`` gets a line per step of that. All
    weight files are hashed, which takes seconds per GB the first time and nothing later.

    Raises:
        ConfigError: one line with the field and the remedy.
    """
    try:
        match service.spec.engine.type:
            case EngineType.VLLM:
                return with_deployment(_vllm_record(service, base_dir, progress))
            case EngineType.OPENAI_HTTP:
                return with_deployment(_server_record(service, base_dir))
            case EngineType.SIMULATED:
                return with_deployment(_simulated_record(service, base_dir))
    except ConfigError as error:
        # What does not name a field is wrong with the files, and those are where spec.source points.
        field = "" if str(error).startswith("spec.") else "spec.source: "
        raise ConfigError(f"{service.metadata.name}: {field}{error}") from None


def verify_record(record: ModelRecord, *, trust_cache: bool = True) -> None:
    """Checks at load that the files are those of the record: weights, configuration, tokenizer and template (PRO-3).

    Records without files pass. ``trust_cache=False`` reads every byte of the weights again.

    Raises:
        EngineError: one line; something changed since the model was applied, or cannot be read.
    """
    if record.engine_type is not EngineType.VLLM:
        return
    directory = Path(record.source)
    hashing.verify(directory, record.weights_hash, trust_cache=trust_cache)
    rank = record.adapters_rank_max if record.adapters_max else 0
    codec, converted = (record.kv_codec, record.kv_converted) if record.kv_reuse else ("", False)
    kind = _kind(record.task, rank, codec, kv_converted=converted)
    try:
        found = _files_hash(directory, record.weights_hash, record.dtype, runs_with(record.engine_options), kind)
        if found != record.model_hash:  # an older version's has the parsers too
            found = _files_hash(directory, record.weights_hash, record.dtype, record.engine_options, kind)
    except ConfigError as error:
        raise EngineError(str(error)) from None
    if found != record.model_hash:
        raise EngineError(
            f"{directory}: configuration, tokenizer or chat template changed since they were registered (model hash "
            f"{found[:16]}, expected {record.model_hash[:16]}); restore the files or run 'carpool apply' again"
        )


def source_directory(source: str, base_dir: Path, progress: Progress | None = None) -> Path:
    """The absolute directory that ``source`` names; built-in models are made or fetched when they are not there yet.

    Raises:
        ConfigError: an unknown built-in model, or it could not be fetched.
    """
    if not source.startswith(BUILTIN_PREFIX):
        return (base_dir / Path(source).expanduser()).resolve()
    builtin = source.removeprefix(BUILTIN_PREFIX)
    if builtin in ("smollm2", "smollm2-135m-instruct"):
        from profiles.smollm2 import ensure_smollm2

        return ensure_smollm2(progress)
    if match := _TINY.fullmatch(builtin):
        from profiles.tiny import make_tiny

        directory = models_dir() / builtin
        return directory if (directory / "config.json").is_file() else make_tiny(builtin, directory, seed=int(match[1]))
    raise ConfigError(
        f"spec.source: unknown built-in model {builtin!r}; use builtin:smollm2-135m-instruct or builtin:tiny-<seed>"
    )


def _vllm_record(service: ModelService, base_dir: Path, progress: Progress | None) -> ModelRecord:
    spec, engine = service.spec, service.spec.engine
    assert spec.source is not None  # the service was checked
    directory = source_directory(spec.source, base_dir, progress)
    if adapters.HUB_ID.fullmatch(spec.source) and not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory; name the folder that holds config.json and *.safetensors (for the model of "
            f"this id at Hugging Face run 'hf download {spec.source} --local-dir DIR' on each host), or use "
            "builtin:smollm2-135m-instruct"
        )
    tensors = capacity.read_weights(directory)
    config = hashing.read_json(directory / "config.json")
    shape = capacity.read_shape(config, str(directory / "config.json"))
    dtype = capacity.resolve_dtype(config, engine.dtype)
    kv_option = str(engine.options.get("kv_cache_dtype", "auto"))
    kv_dtype = "fp8" if kv_option.startswith("fp8") else dtype
    per_token = capacity.kv_bytes_per_token(shape, kv_dtype)
    context_len = _context_len(engine.max_context_len, shape.max_context_len)
    kv_bytes = _kv_bytes(service, per_token, context_len)
    weights_hash = hashing.weights_hash(directory)
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(f"{directory}: no tokenizer.json; save the model's fast tokenizer there")
    weights_bytes = capacity.loaded_bytes(tensors, dtype)
    slots = adapters.adapters_max(service)
    rank = spec.adapters_rank_max if slots else 0
    slot_bytes = adapters.adapter_bytes(tensors, rank, dtype)
    codec, converted = (spec.kv.codec, spec.kv.converted) if spec.kv.reuse else ("", False)  # Nothing is kept.
    kind = _kind(spec.task, rank, codec, kv_converted=converted)
    kv_named = _kv_named(kv_option, dtype, tensors)
    if converted and kv_named != "fp8":
        raise ConfigError(
            "spec.kv.converted: the model's files bring scales for a cache in fp8, which converted KV lacks; remove it"
        )
    computed_by = _computed_by(config, engine.options, "" if converted or kv_named == dtype else dtype)
    signature = capacity.kv_signature(shape, kv_named, weights_hash, computed_by, engine.block_size)
    return _record(
        service,
        model_hash=_files_hash(directory, weights_hash, dtype, runs_with(engine.options), kind),
        weights_hash=weights_hash,
        kv_signature=_kept_as(signature, codec, converted=converted),
        source=str(directory),
        tokenizer=directory,
        dtype=dtype,
        weights_bytes=weights_bytes,
        per_token=per_token,
        kv_bytes=kv_bytes,
        overhead_bytes=capacity.cpu_overhead_bytes(weights_bytes) + slots * adapters.HELD_TIMES * slot_bytes,
        context_len=context_len,
        random_weights=_is_random(directory),
        parameters=capacity.parameters_used(tensors, shape),
        attention_width=shape.attention_width,
        adapters_of=adapters.build_adapters(service, base_dir, tensors, progress),
    )


def _kv_named(option: str, dtype: str, tensors: Sequence[capacity.Tensor]) -> str:
    """The precision of a cache by vLLM's option: ``fp8`` is e4m3; every other form has its own name, as its bytes mean
    something else (P2). So has ``fp8`` where the files bring scales for it: bytes that were made without them are others."""
    if option == "auto":
        return dtype
    name = "fp8" if option == "fp8_e4m3" else option.replace("-", "_")
    return f"{name}_scaled" if any(tensor.name.endswith(_KV_SCALES) for tensor in tensors) else name


def _computed_by(
    config: Mapping[str, Any], options: Mapping[str, str | int | float | bool], narrowed_from: str
) -> Mapping[str, Any]:
    """The configuration, and with it what else may change the numbers that an engine computes (P2): options, and the
    precision that it computes in where its cache has another one."""
    more = {name: value for name, value in options.items() if name not in (*_OPTIONS_WITHOUT_KV, *_OPTIONS_NAMED)}
    if narrowed_from:
        more["carpool.narrowed_from"] = narrowed_from
    return {**config, "carpool.engine_options": more} if more else config


def _files_hash(
    directory: Path,
    weights_hash: str,
    dtype: str,
    options: Mapping[str, str | int | float | bool],
    kind: Mapping[str, str | int],
) -> ModelHash:
    tokenizer_hash = hashing.tokenizer_hash(directory, str(options.get("chat_template", "")))
    variant = {"dtype": dtype, "options": options, **kind}
    return hashing.directory_model_hash(directory, weights_hash, tokenizer_hash, variant)


def _server_record(service: ModelService, base_dir: Path) -> ModelRecord:
    """A server that runs elsewhere takes no memory of our devices, unless its owner says how much."""
    spec, engine = service.spec, service.spec.engine
    assert spec.source is not None
    assert engine.max_context_len is not None  # the service was checked
    url = spec.source.rstrip("/")
    options = dict(engine.options)
    if spec.model:
        options.setdefault("model", spec.model)
    parameters = {"url": url, "model": options.get("model", service.metadata.name), **_kind(spec.task)}
    model_hash = hashing.parameters_hash("openai_http", parameters)
    return _record(
        service,
        model_hash=model_hash,
        weights_hash=model_hash,
        source=url,
        tokenizer=_tokenizer_directory(service, base_dir),
        weights_bytes=int((spec.resources.baseline_memory_gb or 0) * 10**9),
        context_len=engine.max_context_len,
        adapters_of=adapters.build_adapters(service, base_dir, ()),
        options=options,
    )


def _simulated_record(service: ModelService, base_dir: Path) -> ModelRecord:
    spec, engine = service.spec, service.spec.engine
    baseline_gb = spec.resources.baseline_memory_gb
    sizes = {
        "weights_bytes": int(baseline_gb * 10**9) if baseline_gb else _SIMULATED_WEIGHTS_BYTES,
        "kv_bytes_per_token": _SIMULATED_KV_BYTES_PER_TOKEN,
        "overhead_bytes": capacity.SIMULATED_OVERHEAD_BYTES,
    }
    for option in _SIZE_OPTIONS:
        value = engine.options.get(option, sizes[option])
        if not isinstance(value, int) or isinstance(value, bool) or value < (1 if option == "kv_bytes_per_token" else 0):
            raise ConfigError(f"spec.engine.options.{option}: expected a number of bytes; write a positive whole number")
        sizes[option] = value
    context_len = engine.max_context_len or _SIMULATED_CONTEXT_LEN
    options = {name: value for name, value in engine.options.items() if name not in _SIZE_OPTIONS}
    parameters = {
        "name": service.metadata.name,
        "model": spec.model or "",
        "version": spec.version,
        "sizes": sizes,
        "context": context_len,
        "seqs": engine.max_num_seqs or 8,
        "block": engine.block_size,
        "dtype": engine.dtype,
        "options": options,
        **_kind(spec.task),
    }
    model_hash = hashing.parameters_hash("simulated", parameters)
    return _record(
        service,
        model_hash=model_hash,
        weights_hash=model_hash,
        kv_signature=f"{model_hash[:16]}-b{engine.block_size}",
        source=f"simulated:{service.metadata.name}",
        tokenizer=_tokenizer_directory(service, base_dir),
        weights_bytes=sizes["weights_bytes"],
        per_token=sizes["kv_bytes_per_token"],
        kv_bytes=_kv_bytes(service, sizes["kv_bytes_per_token"], context_len),
        overhead_bytes=sizes["overhead_bytes"],
        context_len=context_len,
        adapters_of=adapters.build_adapters(service, base_dir, ()),
        options=options,
    )


def _record(
    service: ModelService,
    *,
    model_hash: ModelHash,
    weights_hash: str,
    source: str,
    tokenizer: Path | None,
    weights_bytes: int,
    context_len: int,
    kv_signature: str = "",
    dtype: str = "auto",
    per_token: int = 0,
    kv_bytes: int = 0,
    overhead_bytes: int = 0,
    random_weights: bool = False,
    parameters: int = 0,
    attention_width: int = 0,
    adapters_of: tuple[Adapter, ...] = (),
    options: dict[str, str | int | float | bool] | None = None,
) -> ModelRecord:
    spec, engine, strategy = service.spec, service.spec.engine, service.spec.strategy
    return ModelRecord(
        name=service.metadata.name,
        version=spec.version,
        model_hash=model_hash,
        weights_hash=weights_hash,
        kv_signature=kv_signature,
        engine_type=engine.type,
        source=source,
        aliases=service.metadata.aliases,
        sla=spec.sla.as_message(),
        sla_class=strategy.sla_class,
        tags=strategy.tags,
        quality_tier=strategy.quality_tier,
        cost_weight=strategy.cost_weight,
        dtype=dtype,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes=kv_bytes,
        overhead_bytes=overhead_bytes,
        budget_bytes=-(-(weights_bytes + kv_bytes) // spec.resources.gpus) + overhead_bytes,
        block_size=engine.block_size,
        max_context_len=context_len,
        max_num_seqs=engine.max_num_seqs or (0 if engine.type is EngineType.VLLM else 8),
        max_output_tokens_default=min(engine.max_output_tokens_default, context_len - 1),
        warmup_tokens=min(engine.warmup_tokens, context_len // 2),
        min_replicas=strategy.min_replicas,
        max_replicas=strategy.max_replicas,
        keep_s=strategy.keep_s,
        pinned=strategy.pinned,
        allow_co_location=strategy.allow_co_location,
        tenant=strategy.tenant or "",
        fallback=strategy.fallback or "",
        max_wait_s=strategy.max_wait_s,
        queue_requests_max=strategy.queue_requests_max,
        random_weights=random_weights,
        engine_options=dict(engine.options) if options is None else options,
        model_id=spec.model or service.metadata.name,
        tokenizer_source=str(tokenizer) if tokenizer else "",
        tokenizer_hash=hashing.tokenizer_hash(tokenizer, str(engine.options.get("chat_template", ""))) if tokenizer else "",
        mode=strategy.mode,
        supported_dtypes=strategy.supported_dtypes,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        baseline_memory_gb=spec.resources.baseline_memory_gb,
        compute_efficiency=spec.resources.compute_efficiency,
        latency_sensitivity=spec.resources.latency_sensitivity,
        gpus=spec.resources.gpus,
        costs={kind: costs.as_message() for kind, costs in sorted(spec.resources.costs.items())},
        task=spec.task,
        adapters=adapters_of,
        adapters_max=adapters.adapters_max(service),
        adapters_rank_max=spec.adapters_rank_max if adapters.adapters_max(service) else 0,
        kv_reuse=spec.kv.reuse,
        kv_codec=spec.kv.codec,
        kv_converted=spec.kv.converted,
        parameters=parameters,
        attention_width=attention_width,
    )


LOSSY_CODECS = ("fp8", "int4")
"""KV comes back from disk otherwise than it was computed."""


def _kind(task: Task, adapters_rank: int = 0, kv_codec: str = "", *, kv_converted: bool = False) -> dict[str, str | int]:
    """What a model hash has of it: nothing for models that generate without adapters, whose hashes are older.

    Which adapters there are is no part of it, so that they may come and go while replicas run. Whether there may be any is,
    and their rank: an engine is built for that, so its replicas are others. A lossy codec of KV is too, and KV of another
    precision, since texts may differ by it; whether KV is reused, and codecs that give back what they got, are not.
    """
    kind: dict[str, str | int] = {} if task is Task.GENERATE else {"task": task.value}
    if adapters_rank:
        kind["adapters_rank_max"] = adapters_rank
    if kv_converted:
        kind["kv_converted"] = 1
    return kind | {"kv_codec": kv_codec} if kv_codec in LOSSY_CODECS else kind


def _kept_as(signature: str, codec: str, *, converted: bool) -> str:
    """Blocks that a lossy codec may have gone through are never given to a service of the same weights without one, nor
    those that may have been converted to one that takes none (``kvcache.codec.precision`` reads this)."""
    kept = f"{signature}-{capacity.CONVERTED}" if converted else signature
    return f"{kept}-{codec}" if codec in LOSSY_CODECS else kept


def _tokenizer_directory(service: ModelService, base_dir: Path) -> Path | None:
    if service.spec.tokenizer is None:
        return None
    directory = (base_dir / Path(service.spec.tokenizer).expanduser()).resolve()
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(f"spec.tokenizer: {directory} has no tokenizer.json; name a folder with a fast tokenizer")
    return directory


def _context_len(declared: int | None, possible: int) -> int:
    if declared is not None and declared > possible:
        raise ConfigError(
            f"spec.engine.max_context_len: {declared} is above the {possible} tokens of the model's config.json; lower it"
        )
    return declared if declared is not None else possible


def _kv_bytes(service: ModelService, per_token: int, context_len: int) -> int:
    engine = service.spec.engine
    if engine.kv_cache_bytes is None:
        return capacity.kv_default_bytes(per_token, engine.block_size, context_len, engine.max_num_seqs or 8)
    declared = parse_size(engine.kv_cache_bytes)
    # One page is the engine's own; the rest must hold at least one longest context, or such a request could never run.
    pages = declared // (per_token * engine.block_size) - 1
    needed = capacity.pages_for(context_len, engine.block_size)
    if pages < needed:
        raise ConfigError(
            f"spec.engine.kv_cache_bytes: {declared} bytes hold {max(pages, 0) * engine.block_size} tokens, but "
            f"max_context_len is {context_len}; give at least {(needed + 1) * per_token * engine.block_size} bytes "
            "or lower max_context_len"
        )
    return declared


def _is_random(directory: Path) -> bool:
    marker = directory / "carpool.json"
    return marker.is_file() and hashing.read_json(marker).get("random_weights") is True
