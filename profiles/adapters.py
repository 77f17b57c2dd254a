"""LoRA adapters of a model: the files that a service names, checked against the model's own before anything is loaded.

vLLM copies what fits of an adapter and leaves out layers that a model does not have, so an adapter of another base would
answer nonsense without a word. Its parts are therefore compared with the base's weights here, and an engine loads only files
whose hash is the one that was checked.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from profiles import hashing
from profiles.capacity import DTYPE_BYTES, Tensor, read_tensors
from profiles.service import AdapterSpec, ModelService
from subjects.errors import ConfigError, EngineError
from subjects.messages import Adapter, EngineType

ADAPTERS_MAX_DEFAULT = 4
"""Adapters that one replica holds at once, where a service lists adapters and says no number."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
HELD_TIMES = 2
"""An adapter is held as it was loaded and again in the slot that the kernels read."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""What an id at Hugging Face looks like, and many a relative path too."""
_LAYER = re.compile(r"(?:^|\.)((?:layers|h|blocks?)\.\d+\..+)$")
_PART = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.weight)?")
_KEPT_BASE = ".base_layer.weight"
"""Of an embedding that peft saves beside an adapter, and that no engine takes from there."""


def build_adapters(
    service: ModelService, base_dir: Path, base: Iterable[Tensor], progress: Callable[[str], None] | None = None
) -> tuple[Adapter, ...]:
    """What the record says of the service's adapters; for vLLM their files are read and compared with ``base``.

    Raises:
        ConfigError: one line with the field and the remedy.
    """
    if service.spec.engine.type is not EngineType.VLLM:
        return tuple(_without_files(spec) for spec in service.spec.adapters)
    shapes = _shapes_of(base) if service.spec.adapters else {}
    adapters = []
    for index, spec in enumerate(service.spec.adapters):
        try:
            adapter, trained_for = _from_files(spec, base_dir, shapes, service.spec.adapters_rank_max)
        except ConfigError as error:
            raise ConfigError(f"spec.adapters[{index}].source: {error}") from None
        if progress is not None and trained_for and service.spec.model and trained_for != service.spec.model:
            progress(f"{adapter.name}: made for {trained_for}, and used with {service.spec.model}, whose layers are alike")
        adapters.append(adapter)
    return tuple(adapters)


def adapters_max(service: ModelService) -> int:
    """How many adapters a replica is started for."""
    declared = service.spec.adapters_max
    if declared is not None:
        return declared
    return ADAPTERS_MAX_DEFAULT if service.spec.adapters and service.spec.engine.type is not EngineType.OPENAI_HTTP else 0


def adapter_bytes(base: Iterable[Tensor], rank: int, dtype: str) -> int:
    """What one adapter of that rank takes at most: two thin matrices for each matrix of the model.

    vLLM makes its slots at the start, for all layers that an adapter may change, whatever its adapters change: measured with
    SmolLM2, 16 slots of rank 16 are 207,224,832 bytes, which is this sum to the byte. A head that is tied to the embedding
    is not among the tensors, and has a slot all the same.
    """
    matrices = [tensor for tensor in base if len(tensor.shape) == 2 and tensor.keeps_its_shape]
    both_sides = sum(sum(tensor.shape) for tensor in matrices)
    if not any("lm_head" in tensor.name for tensor in matrices):
        embeddings = (sum(tensor.shape) for tensor in matrices if "embed" in tensor.name or "wte" in tensor.name)
        both_sides += max(embeddings, default=0)
    return both_sides * rank * DTYPE_BYTES[dtype]


def verify_adapter(adapter: Adapter) -> None:
    """Checks right before a load that the files are those that were applied.

    Raises:
        EngineError: one line without a path, since a client sees it.
    """
    directory = Path(adapter.source)
    if not directory.is_dir():
        raise EngineError(f"the files of adapter '{adapter.name}' are missing on this worker")
    try:
        found = _hash_of(directory)
    except ConfigError:
        raise EngineError(f"the files of adapter '{adapter.name}' are missing or broken on this worker") from None
    if found != adapter.adapter_hash:
        raise EngineError(f"the files of adapter '{adapter.name}' changed since it was applied; it has to be applied again")


# ---------------------------------------------------------------------------------------------------------------- within


def _without_files(spec: AdapterSpec) -> Adapter:
    source = spec.source or spec.name
    return Adapter(
        name=spec.name,
        aliases=spec.aliases,
        source=source,
        adapter_hash=hashlib.sha256(f"carpool adapter name 1\n{source}\n".encode()).hexdigest(),
    )


def _from_files(
    spec: AdapterSpec, base_dir: Path, base: dict[str, list[tuple[int, ...]]], rank_max: int
) -> tuple[Adapter, str]:
    assert spec.source is not None  # the service was checked
    directory = _directory(spec.source, base_dir)
    config = hashing.read_json(directory / CONFIG_FILE)
    _check_config(config, directory / CONFIG_FILE)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        others = sorted(each.name for each in directory.glob("adapter_model.*"))
        found = f" (found {', '.join(others)})" if others else ""
        raise ConfigError(f"{directory}: no {WEIGHTS_FILE}{found}; save the adapter with save_pretrained")
    rank = _check_parts(list(read_tensors(path)), base, path)
    if rank > rank_max:
        raise ConfigError(f"{directory}: its rank is {rank}, above {rank_max}; raise spec.adapters_rank_max")
    adapter = Adapter(
        name=spec.name,
        aliases=spec.aliases,
        source=str(directory),
        adapter_hash=_hash_of(directory),
        rank=rank,
        size_bytes=path.stat().st_size,
    )
    trained_for = config.get("base_model_name_or_path")
    return adapter, trained_for if isinstance(trained_for, str) and HUB_ID.fullmatch(trained_for) else ""


def _directory(source: str, base_dir: Path) -> Path:
    directory = (base_dir / Path(source).expanduser()).resolve()
    if directory.is_dir():
        return directory
    if not HUB_ID.fullmatch(source):
        raise ConfigError(f"{directory}: no such directory; name the folder that holds {CONFIG_FILE}")
    snapshot = _cached_snapshot(source)
    if snapshot is None:
        raise ConfigError(
            f"{directory}: no such directory, and {source} is not in the local Hugging Face cache; name the folder that "
            f"holds {CONFIG_FILE}, or run 'hf download {source}' on each host"
        )
    return snapshot


def _cached_snapshot(hub_id: str) -> Path | None:
    """Where ``hf download`` put it: the snapshot that ``main`` names."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    repository = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{hub_id.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except (OSError, UnicodeError):
        return None
    return snapshot if snapshot.is_dir() else None


def _check_config(config: dict[str, object], path: Path) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{path}: peft_type is {str(config['peft_type'])[:40]!r}; only LORA adapters are served")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{path}: {name}: expected a positive number; save the adapter again")
    if not config.get("target_modules"):
        raise ConfigError(f"{path}: target_modules: is missing; save the adapter again")
    for name in ("use_dora", "modules_to_save", "lora_bias", "layer_replication"):
        if config.get(name):
            raise ConfigError(f"{path}: {name} is set, which vLLM does not serve; train the adapter without it")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{path}: bias is not 'none', which vLLM does not serve; train the adapter without it")


def _shapes_of(base: Iterable[Tensor]) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the matrices by what :func:`_place` calls them; empty lists for those whose shape the header hides."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for tensor in base:
        module, _, kind = tensor.name.rpartition(".")
        known = shapes.setdefault(_place(module), [])
        if kind == "weight" and len(tensor.shape) == 2 and tensor.keeps_its_shape:
            known.append(tensor.shape)
    return shapes


def _place(module: str) -> str:
    """A module's name from its layer on: what stands before differs between files of a model and of its adapters."""
    layer = _LAYER.search(module)
    return layer[1] if layer else module.rpartition(".")[2]


def _check_parts(tensors: list[Tensor], base: dict[str, list[tuple[int, ...]]], path: Path) -> int:
    """Returns the largest rank of all pairs."""
    sides: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    for tensor in tensors:
        part = _PART.fullmatch(tensor.name)
        if part is None:
            if tensor.name.endswith(_KEPT_BASE):
                continue
            raise ConfigError(f"{path}: {tensor.name[:100]!r} is no part of a LoRA adapter; save the adapter again")
        sides[part["side"]][part["module"]] = tensor
    if not sides["A"] or sides["A"].keys() != sides["B"].keys():
        raise ConfigError(f"{path}: does not hold a lora_A and a lora_B for each of its modules; save the adapter again")
    rank_max = 0
    for module in sorted(sides["A"]):
        a, b = sides["A"][module], sides["B"][module]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise ConfigError(f"{path}: the two matrices of {module[:100]} do not fit together; save the adapter again")
        rank_max = max(rank_max, a.shape[0])
        if "experts" in module:
            continue  # a base may hold these as one tensor for all experts
        known = base.get(_place(module))
        if known is None:
            raise ConfigError(f"{path}: this model has no {module[:100]}; the adapter was made for another base")
        changed = (b.shape[0], a.shape[1])
        if known and changed not in known and changed[::-1] not in known:
            shapes = f"{changed[0]} x {changed[1]}, the model's is {known[0][0]} x {known[0][1]}"
            raise ConfigError(f"{path}: {module[:100]} is {shapes}; the adapter was made for another base")
    return rank_max


def _hash_of(directory: Path) -> str:
    config = hashing.canonical_json(hashing.read_json(directory / CONFIG_FILE))
    digest = hashing.Digests().file(directory / WEIGHTS_FILE)
    return hashlib.sha256(f"carpool adapter 1\n{config}\n{digest}\n".encode()).hexdigest()
