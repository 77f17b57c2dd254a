"""LoRA adapters in a model's file: what is checked at apply and at load, and what they cost (ING-3, PRO-1, PRO-3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiles.adapters import ADAPTERS_MAX_DEFAULT, adapter_bytes, verify_adapter
from profiles.capacity import Tensor
from profiles.model_files import write_bfloat16, write_json
from profiles.record import build_record, verify_record
from profiles.service import parse_services
from profiles.tiny import make_tiny
from subjects.codec import decode, encode
from subjects.errors import ConfigError, EngineError
from subjects.messages import ModelRecord
from tests.adapters import ALL_MODULES, make_adapter


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model at ``m``, and a user cache of the test's own."""
    monkeypatch.setenv("CARPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return make_tiny("m", tmp_path / "m", seed=1)


def record_of(folder: Path, lines: list[str] | None = None, **spec: Any) -> ModelRecord:
    """The record of a service in that folder."""
    document = {"apiVersion": "llm.serving/v1", "kind": "ModelService", "metadata": {"name": "m"}}
    document["spec"] = {"source": "m", **spec}
    service = parse_services(json.dumps(document).encode())[0]
    return build_record(service, folder, progress=None if lines is None else lines.append)


def listed(*names: str) -> dict[str, Any]:
    """A spec with adapters in folders of their names."""
    return {"adapters": [{"name": name, "source": name, "aliases": [f"team/{name}"]} for name in names]}


def test_an_adapter_is_in_the_record_with_what_its_files_say(base: Path, tmp_path: Path) -> None:
    """Name, aliases, absolute source, rank, bytes and a hash of the content; the record survives the wire."""
    directory = make_adapter(base, tmp_path / "sql", seed=1, rank=8)
    record = record_of(tmp_path, **listed("sql"))
    adapter = record.adapters[0]
    assert (adapter.name, adapter.aliases, adapter.source, adapter.rank) == ("sql", ("team/sql",), str(directory), 8)
    assert adapter.size_bytes == (directory / "adapter_model.safetensors").stat().st_size
    assert (record.adapters_max, record.adapters_rank_max) == (ADAPTERS_MAX_DEFAULT, 16)
    assert decode(encode(record), ModelRecord) == record
    verify_record(record)
    verify_adapter(adapter)


def test_adapters_come_and_go_without_another_model_hash(base: Path, tmp_path: Path) -> None:
    """Which adapters, and how many at once, is no part of the hash; that there may be any, and their rank, is."""
    for seed, name in enumerate("ab"):
        make_adapter(base, tmp_path / name, seed=seed)
    plain = record_of(tmp_path)
    ready = record_of(tmp_path, adapters_max=2)
    one, two = record_of(tmp_path, **listed("a")), record_of(tmp_path, adapters_max=8, **listed("a", "b"))
    wider = record_of(tmp_path, adapters_max=2, adapters_rank_max=32)
    assert ready.model_hash == one.model_hash == two.model_hash
    assert len({plain.model_hash, ready.model_hash, wider.model_hash}) == 3
    assert {plain.kv_signature, ready.kv_signature} == {plain.kv_signature}
    assert (plain.adapters_max, plain.adapters_rank_max, plain.adapters) == (0, 0, ())
    for record in (plain, ready, two, wider):
        verify_record(record)


def test_a_replica_is_charged_for_its_adapters(base: Path, tmp_path: Path) -> None:
    """Each slot costs two thin matrices per matrix of the model, held twice; nothing without adapters."""
    plain, two, four = (record_of(tmp_path, adapters_max=slots) for slots in (0, 2, 4))
    assert four.budget_bytes - plain.budget_bytes == 2 * (two.budget_bytes - plain.budget_bytes) > 0
    wide = record_of(tmp_path, adapters_max=2, adapters_rank_max=64)
    assert wide.overhead_bytes - plain.overhead_bytes == 4 * (two.overhead_bytes - plain.overhead_bytes)


def test_a_slot_is_what_vllm_makes() -> None:
    """SmolLM2 (hidden 576, 30 layers, 9 and 3 heads of 64, inner 1,536, tied vocabulary of 49,152): 12,951,552 bytes at
    rank 16 in bf16, as counted in vLLM's own tensors."""
    shapes = {"q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576)}
    shapes |= {"gate_proj": (1536, 576), "up_proj": (1536, 576), "down_proj": (576, 1536)}
    tensors = [Tensor(f"model.layers.{i}.x.{name}.weight", "BF16", shapes[name], 0) for i in range(30) for name in shapes]
    tensors += [Tensor("model.embed_tokens.weight", "BF16", (49152, 576), 0), Tensor("model.norm.weight", "BF16", (576,), 0)]
    assert adapter_bytes(tensors, 16, "bfloat16") == 207_224_832 // 16
    untied = [*tensors, Tensor("lm_head.weight", "BF16", (49152, 576), 0)]
    assert adapter_bytes(untied, 16, "bfloat16") == 207_224_832 // 16


def test_changed_files_are_another_adapter_and_are_not_loaded_as_the_old_one(base: Path, tmp_path: Path) -> None:
    """Weights or configuration: the hash is another, and the record of before is refused without a path in the text."""
    directory = make_adapter(base, tmp_path / "a", seed=1)
    before = record_of(tmp_path, **listed("a")).adapters[0]
    make_adapter(base, directory, seed=2)
    weights = record_of(tmp_path, **listed("a")).adapters[0]
    write_json(directory / "adapter_config.json", json.loads((directory / "adapter_config.json").read_text()) | {"r": 2})
    config = record_of(tmp_path, **listed("a")).adapters[0]
    assert len({before.adapter_hash, weights.adapter_hash, config.adapter_hash}) == 3
    for old in (before, weights):
        with pytest.raises(EngineError, match="the files of adapter 'a' changed since it was applied"):
            verify_adapter(old)
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(EngineError, match="the files of adapter 'a' are missing or broken on this worker"):
        verify_adapter(config)


def _broken(base: Path, directory: Path, how: str) -> None:
    """An adapter with one thing wrong."""
    changes: dict[str, dict[str, Any]] = {
        "dora": {"use_dora": True},
        "bias": {"bias": "all"},
        "saved": {"modules_to_save": ["lm_head"]},
        "kind": {"peft_type": "IA3"},
        "r": {"r": 0},
        "alpha": {"lora_alpha": None},
        "targets": {"target_modules": []},
    }
    rank = 32 if how == "rank" else 4
    make_adapter(base, directory, seed=1, rank=rank, modules=ALL_MODULES, **changes.get(how, {}))
    weights, settings = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no weights":
        weights.rename(directory / "adapter_model.bin")
    elif how == "no config":
        settings.unlink()
    elif how == "not json":
        settings.write_text("{")
    else:
        zeros = {name: np.zeros(shape, np.float32) for name, shape in PARTS.get(how, {}).items()}
        if zeros:
            write_bfloat16(weights, zeros)


_Q = "base_model.model.model.layers.0.self_attn.q_proj"
PARTS: dict[str, dict[str, tuple[int, ...]]] = {
    "half": {f"{_Q}.lora_A.weight": (4, 128)},
    "unfit": {f"{_Q}.lora_A.weight": (4, 128), f"{_Q}.lora_B.weight": (128, 8)},
    "other width": {f"{_Q}.lora_A.weight": (4, 256), f"{_Q}.lora_B.weight": (256, 4)},
    "more layers": {
        f"{_Q.replace('.0.', '.99.')}.lora_{side}.weight": shape for side, shape in (("A", (4, 128)), ("B", (128, 4)))
    },
    "foreign": {f"{_Q}.weight": (128, 128)},
}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("dora", "use_dora is set, which vLLM does not serve"),
        ("bias", "bias is not 'none'"),
        ("saved", "modules_to_save is set"),
        ("kind", "peft_type is 'IA3'; only LORA adapters are served"),
        ("r", "r: expected a positive number"),
        ("alpha", "lora_alpha: expected a positive number"),
        ("targets", "target_modules: is missing"),
        ("rank", "its rank is 32, above 16; raise spec.adapters_rank_max"),
        ("cut", "is not a complete safetensors file"),
        ("no weights", "no adapter_model.safetensors (found adapter_model.bin); save the adapter"),
        ("no config", "adapter_config.json: no such file"),
        ("not json", "adapter_config.json: is not JSON"),
        ("half", "does not hold a lora_A and a lora_B for each"),
        ("unfit", "do not fit together"),
        ("other width", "is 256 x 256, the model's is"),
        ("more layers", "this model has no model.layers.99.self_attn.q_proj; the adapter was made for another base"),
        ("foreign", "is no part of a LoRA adapter"),
    ],
)
def test_what_could_not_be_served_is_refused_at_apply(base: Path, tmp_path: Path, how: str, says: str) -> None:
    """One line that names the field and the remedy, before anything runs."""
    _broken(base, tmp_path / "bad", how)
    make_adapter(base, tmp_path / "good", seed=2)
    with pytest.raises(ConfigError) as error:
        record_of(tmp_path, **listed("good", "bad"))
    assert str(error.value).startswith("m: spec.adapters[1].source: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_hub_id_is_looked_up_in_the_local_cache_only(base: Path, tmp_path: Path) -> None:
    """What ``hf download`` left there is used; else the line says what to run. Nothing is fetched."""
    spec: dict[str, Any] = {"adapters": [{"name": "sql", "source": "team/sql-lora"}]}
    with pytest.raises(ConfigError, match="run 'hf download team/sql-lora' on each host") as error:
        record_of(tmp_path, **spec)
    assert f"{tmp_path / 'team' / 'sql-lora'}: no such directory" in str(error.value)
    repository = tmp_path / "hf" / "hub" / "models--team--sql-lora"
    snapshot = make_adapter(base, repository / "snapshots" / "abc", seed=1)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert record_of(tmp_path, **spec).adapters[0].source == str(snapshot)
    with pytest.raises(ConfigError, match=r"no such directory; name the folder that holds adapter_config\.json"):
        record_of(tmp_path, adapters=[{"name": "sql", "source": "./nowhere"}])


def test_another_base_of_the_same_shape_is_told(base: Path, tmp_path: Path) -> None:
    """It may be meant (a base model's adapter on its instruct version), so it is a line and no error."""
    make_adapter(base, tmp_path / "a", seed=1, base_model_name_or_path="org/other")
    lines: list[str] = []
    record_of(tmp_path, lines, model="org/mine", **listed("a"))
    assert lines == ["a: made for org/other, and used with org/mine, whose layers are alike"]


def test_engines_without_files_take_names(tmp_path: Path) -> None:
    """A server loads its adapters itself and knows them by ``source``; a simulated engine takes any."""
    adapters = [{"name": "a"}, {"name": "b", "source": "their-b"}]
    engine = {"type": "openai_http", "max_context_len": 1024}
    server = record_of(tmp_path, source="http://127.0.0.1:1/v1", engine=engine, adapters=adapters)
    assert [(each.name, each.source, each.rank) for each in server.adapters] == [("a", "a", 0), ("b", "their-b", 0)]
    assert server.adapters[0].adapter_hash != server.adapters[1].adapter_hash
    assert (server.adapters_max, server.adapters_rank_max) == (0, 0)
    bare = record_of(tmp_path, source="http://127.0.0.1:1/v1", engine=engine)
    assert server.model_hash == bare.model_hash
    simulated = record_of(tmp_path, source=None, engine={"type": "simulated"}, adapters=adapters)
    assert [each.name for each in simulated.adapters] == ["a", "b"]
    assert simulated.model_hash == record_of(tmp_path, source=None, engine={"type": "simulated"}).model_hash
