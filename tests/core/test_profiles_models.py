"""Tiny models, hashes, capacity arithmetic and records (PRO-1 to PRO-4)."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from profiles import capacity, hashing
from profiles.capacity import takes_converted
from profiles.hashing import Digests, verify, weights_hash
from profiles.record import build_record, verify_record
from profiles.service import parse_services
from profiles.tiny import SIZES, VOCABULARY, make_tiny
from profiles.tokenizer import ModelTokenizer
from subjects.codec import decode, encode
from subjects.errors import ConfigError, EngineError
from subjects.messages import Endpoint, EngineType, Lane, ModelRecord, StepCosts, Task


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user cache of the test's own."""
    monkeypatch.setenv("CARPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def record_of(spec: dict[str, Any], base: Path, name: str = "a") -> ModelRecord:
    """The record of a service with this ``spec``."""
    document = {"apiVersion": "llm.serving/v1", "kind": "ModelService", "metadata": {"name": name}, "spec": spec}
    return build_record(parse_services(json.dumps(document).encode())[0], base)


# --------------------------------------------------------------------------------------------------------------- tiny


def _parameters(weights: list[capacity.Tensor]) -> int:
    """Of all tensors."""
    return sum(math.prod(tensor.shape) for tensor in weights)


def test_tiny_is_a_complete_model_that_says_it_is_random(tmp_path: Path) -> None:
    """Weights of the known number of parameters, and a label in each place a person or a program may look."""
    directory = make_tiny("noise", tmp_path / "noise", seed=1)
    weights = capacity.read_weights(directory)
    assert _parameters(weights) == 426_624 and capacity.loaded_bytes(weights, "bfloat16") == 2 * 426_624
    assert json.loads((directory / "carpool.json").read_text()) == {"name": "noise", "random_weights": True, "seed": 1}
    assert "random weights" in (directory / "README.md").read_text()
    assert json.loads((directory / "config.json").read_text())["carpool_random_weights_seed"] == 1


@pytest.mark.parametrize("size", list(SIZES))
def test_tiny_sizes_are_what_their_header_says(tmp_path: Path, size: str) -> None:
    """Bytes on disk are the header plus two bytes for each parameter."""
    directory = make_tiny("x", tmp_path / "x", seed=2, size=size)
    file = directory / "model.safetensors"
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == 8 + header_bytes + 2 * _parameters(capacity.read_weights(directory))


def test_tiny_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    """The file written by hand is what the library reads, with values that differ by seed only."""
    safetensors = pytest.importorskip("safetensors")
    directory = make_tiny("x", tmp_path / "x", seed=3)
    with (directory / "model.safetensors").open("rb") as file:
        tensors = dict(safetensors.deserialize(file.read()))
    assert tensors["lm_head.weight"]["shape"] == [VOCABULARY, 128]
    assert tensors["model.norm.weight"]["data"] == bytearray(b"\x80\x3f" * 128)  # 1.0 in bfloat16


def test_seeds_give_other_weights_and_the_same_seed_the_same(tmp_path: Path) -> None:
    """The seed decides the weights; the name and the place do not."""
    first = weights_hash(make_tiny("a", tmp_path / "a", seed=1))
    assert weights_hash(make_tiny("b", tmp_path / "b", seed=1)) == first
    assert weights_hash(make_tiny("c", tmp_path / "c", seed=2)) != first


def test_tiny_replaces_a_tiny_and_nothing_else(tmp_path: Path) -> None:
    """Making it again is fine; a folder with other things in it is left alone."""
    directory = make_tiny("a", tmp_path / "a", seed=1)
    make_tiny("a", directory, seed=2)
    assert json.loads((directory / "carpool.json").read_text())["seed"] == 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("dear")
    with pytest.raises(ConfigError, match="holds something else"):
        make_tiny("a", other, seed=1)
    assert (other / "thesis.txt").read_text() == "dear"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "other"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 1, "size": "huge"}, "unknown size"),
        ({"seed": -1}, "seed"),
        ({"seed": 1, "max_context_len": 3}, "at least 16"),
    ],
)
def test_tiny_refuses_in_one_line(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    """Wrong arguments are ConfigErrors."""
    with pytest.raises(ConfigError, match=message):
        make_tiny("a", tmp_path / "a", **arguments)


@pytest.mark.parametrize("text", ["hello the world", "", "日本語 😀 \x00\x07", "ünïcödé\n\n\t x", "<|im_end|>"])
def test_any_text_encodes_with_the_tiny_tokenizer(tmp_path: Path, text: str) -> None:
    """The vocabulary has every byte, so encoding loses nothing."""
    from tokenizers import Tokenizer

    directory = make_tiny("a", tmp_path / "a", seed=1)
    ids = ModelTokenizer(directory).prompts(Endpoint.COMPLETIONS, {"prompt": text})[0]
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert library.decode(ids, skip_special_tokens=False) == text
    assert library.get_vocab_size() == VOCABULARY
    assert all(0 <= token < VOCABULARY for token in ids)


# ------------------------------------------------------------------------------------------------------------- hashing


def test_weights_hash_is_of_bytes_names_and_sizes(tmp_path: Path) -> None:
    """Any changed byte and any renamed file gives another hash; other files do not matter (PRO-3)."""
    directory = make_tiny("a", tmp_path / "a", seed=1)
    file = directory / "model.safetensors"
    before = weights_hash(directory)
    (directory / "README.md").write_text("changed")
    assert weights_hash(directory) == before
    file.rename(directory / "renamed.safetensors")
    assert weights_hash(directory) != before
    (directory / "renamed.safetensors").rename(file)
    assert weights_hash(directory) == before
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert weights_hash(directory) != before


def test_verify_refuses_changed_weights(tmp_path: Path) -> None:
    """Verification at load names both hashes and the remedy (PRO-3)."""
    directory = make_tiny("a", tmp_path / "a", seed=1)
    expected = weights_hash(directory)
    verify(directory, expected)
    make_tiny("a", directory, seed=2)
    with pytest.raises(EngineError, match=r"weights changed .* run 'carpool apply' again"):
        verify(directory, expected)
    shutil.rmtree(directory)
    with pytest.raises(EngineError, match="no such directory"):
        verify(directory, expected)


def test_digests_are_remembered_and_forgotten_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A settled file is read once; a change is seen even when size and modification time are put back."""
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"one")
    os.utime(file, (1_000_000_000, 1_000_000_000))
    digests = Digests(tmp_path / "digests.sqlite")
    first = digests.file(file)
    assert not (tmp_path / "digests.sqlite").exists()  # its change time is too young to be trusted
    monkeypatch.setattr(hashing, "_SETTLED_S", -1.0)
    assert digests.file(file) == first
    assert (tmp_path / "digests.sqlite").exists()
    assert digests.file(file) == first
    file.write_bytes(b"two")
    os.utime(file, (1_000_000_000, 1_000_000_000))
    second = digests.file(file)
    assert second != first
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        digests.file(file)


def test_a_remembered_digest_is_used_unless_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cache is believed with ``trust``, and only then."""
    import sqlite3

    file = tmp_path / "w.safetensors"
    file.write_bytes(b"one")
    monkeypatch.setattr(hashing, "_SETTLED_S", -1.0)
    digests = Digests(tmp_path / "digests.sqlite")
    true = digests.file(file)
    with sqlite3.connect(tmp_path / "digests.sqlite") as database:
        database.execute("UPDATE digests SET sha256 = 'planted'")
    database.close()
    assert digests.file(file) == "planted"
    assert digests.file(file, trust=False) == true


def test_a_broken_cache_is_no_obstacle(tmp_path: Path) -> None:
    """A cache file of rubbish, or a cache folder that cannot be made, only costs time."""
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"one")
    expected = Digests(tmp_path / "good.sqlite").file(file)
    (tmp_path / "bad.sqlite").write_bytes(b"x" * 5000)
    assert Digests(tmp_path / "bad.sqlite").file(file) == expected
    assert Digests(file / "below-a-file" / "d.sqlite").file(file) == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such directory"),
        ({}, "no \\*.safetensors files; convert"),
        ({"pytorch_model.bin": b"x"}, "found .bin"),
        ({"model.gguf": b"x"}, "found .gguf"),
    ],
)
def test_missing_weights(tmp_path: Path, files: dict[str, bytes] | None, message: str) -> None:
    """Weights that are missing, or in a format that could run code, are refused with a remedy."""
    directory = tmp_path / "m"
    if files is not None:
        directory.mkdir()
        for name, data in files.items():
            (directory / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        weights_hash(directory)


# ------------------------------------------------------------------------------------------------------------ capacity

LLAMA_3_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
QWEN2_72B = {
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
PHI_3_MINI = {
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
DEEPSEEK_V2_LITE = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
}
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}


@pytest.mark.parametrize(
    ("config", "kib"),
    [(LLAMA_3_8B, 128), (QWEN2_72B, 320), (PHI_3_MINI, 384), (SMOLLM2, 22.5), (DEEPSEEK_V2_LITE, 30.375), (GPT2, 36)],
)
def test_kv_per_token_golden(config: dict[str, Any], kib: float) -> None:
    """2 x layers x kv_heads x head_dim x bytes, in bf16 (SPEC section 2); latent attention keeps one vector per layer."""
    assert capacity.kv_bytes_per_token(capacity.read_shape(config), "bfloat16") == kib * 1024
    assert capacity.kv_bytes_per_token(capacity.read_shape({"text_config": config}), "float32") == 2 * kib * 1024


def test_128k_of_a_72b_model_is_40_gib() -> None:
    """The true number beside the source's 614 MB (SPEC section 2)."""
    assert 131072 * capacity.kv_bytes_per_token(capacity.read_shape(QWEN2_72B), "bfloat16") == 40 << 30


def test_head_dim_of_the_config_wins() -> None:
    """Some models have heads wider than hidden size over heads."""
    assert capacity.read_shape(LLAMA_3_8B | {"head_dim": 256}).head_dim == 256


@pytest.mark.parametrize(
    ("scaling", "context_len"),
    [
        (None, 8192),
        ({"rope_type": "linear", "factor": 4.0}, 32768),
        ({"type": "dynamic", "factor": 2}, 16384),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"rope_theta": 10000.0, "rope_type": "default"}, 8192),
    ],
)
def test_context_with_scaled_positions(scaling: dict[str, Any] | None, context_len: int) -> None:
    """The longest context is read as the engine reads it."""
    assert capacity.read_shape(LLAMA_3_8B | {"rope_scaling": scaling}).max_context_len == context_len


@pytest.mark.parametrize("value", [0, -1, "8", 1.5, True, [8]])
def test_a_broken_config_is_one_line(value: Any) -> None:
    """A layer count that is no count is refused with the file and the field."""
    with pytest.raises(ConfigError, match=r"c\.json: num_hidden_layers: expected a positive integer"):
        capacity.read_shape(LLAMA_3_8B | {"num_hidden_layers": value}, "c.json")


@pytest.mark.parametrize(
    ("config", "wanted", "dtype"),
    [
        ({"torch_dtype": "float16"}, "auto", "float16"),
        ({"dtype": "torch.bfloat16"}, "auto", "bfloat16"),
        ({"dtype": "float32"}, "auto", "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "auto", "float16"),
        ({}, "auto", "bfloat16"),
        ({"dtype": "float16"}, "float32", "float32"),
    ],
)
def test_the_precision_is_named(config: dict[str, Any], wanted: str, dtype: str) -> None:
    """``auto`` becomes the same precision on every device."""
    assert capacity.resolve_dtype(config, wanted) == dtype


def test_quantized_tensors_keep_their_size(tmp_path: Path) -> None:
    """Floating tensors follow the engine's precision, packed integers do not."""
    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "I32", "shape": [5], "data_offsets": [24, 44]},
        "s": {"dtype": "BF16", "shape": [], "data_offsets": [44, 46]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(46))
    weights = capacity.read_weights(tmp_path)
    found = [capacity.loaded_bytes(weights, dtype) for dtype in ("bfloat16", "float32")]
    assert (_parameters(weights), *found) == (12, 34, 48)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:20],
        lambda data: b"",
        lambda data: data[:4],
        lambda data: (1 << 40).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: b"version https://git-lfs.github.com/spec/v1\n",
        lambda data: data.replace(b'"shape":[384,128]', b'"shape":[384,1x8]', 1),
        lambda data: data.replace(b'"shape":[384,128]', b'"shape":[-84,128]', 1),
        lambda data: data.replace(b'"data_offsets"', b'"dota_offsets"', 1),
    ],
)
def test_damaged_weights_are_seen_before_they_are_loaded(tmp_path: Path, damage: Any) -> None:
    """A cut, grown, or mangled safetensors file is one line that names it."""
    directory = make_tiny("a", tmp_path / "a", seed=1)
    file = directory / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"model\.safetensors: is not a complete safetensors file"):
        capacity.read_weights(directory)


@pytest.mark.parametrize(
    ("pages", "lane"),
    [(0, Lane.SMALL), (1, Lane.SMALL), (64, Lane.SMALL), (65, Lane.MEDIUM), (512, Lane.MEDIUM), (513, Lane.LARGE)],
)
def test_lanes(pages: int, lane: Lane) -> None:
    """A lane's ceiling belongs to it."""
    assert capacity.lane_of(pages) is lane


# -------------------------------------------------------------------------------------------------------------- record


def test_record_of_a_tiny_model(tmp_path: Path) -> None:
    """Every number of the record follows from the files."""
    make_tiny("a", tmp_path / "m", seed=1)
    record = record_of({"source": "m", "engine": {"max_num_seqs": 4}}, tmp_path)
    assert record.source == str(tmp_path / "m")
    assert record.dtype == "bfloat16"
    assert record.weights_bytes == 2 * 426_624
    assert record.kv_bytes_per_token == 2 * 2 * 4 * 32 * 2
    assert record.kv_bytes == (4 * 2048 // 32 + 1) * 32 * record.kv_bytes_per_token
    assert record.budget_bytes == record.weights_bytes + record.kv_bytes + record.overhead_bytes
    assert record.max_context_len == 2048
    assert record.random_weights
    assert record.weights_hash == weights_hash(tmp_path / "m")
    assert record.kv_signature.startswith(record.weights_hash[:16])
    assert decode(encode(record), ModelRecord) == record


def test_the_default_kv_budget_is_capped(tmp_path: Path) -> None:
    """A full batch of long contexts does not swallow a device, and one context always fits."""
    assert capacity.kv_default_bytes(128 << 10, 32, 8192, 256) <= capacity.KV_DEFAULT_BYTES_MAX + 32 * (128 << 10)
    assert capacity.kv_default_bytes(320 << 10, 32, 131072, 8) == (131072 // 32 + 1) * 32 * (320 << 10)


def test_hashes_tell_variants_apart(tmp_path: Path) -> None:
    """Precision, chat template and generation defaults are behaviour; the place and the name are not (PRO-3, WRK-6)."""
    make_tiny("a", tmp_path / "m", seed=1)
    base = record_of({"source": "m"}, tmp_path)
    assert (
        record_of({"source": str(tmp_path / "m"), "version": "2"}, tmp_path / "elsewhere", name="b").model_hash
        == base.model_hash
    )
    single = record_of({"source": "m", "engine": {"dtype": "float32"}}, tmp_path)
    assert (single.weights_hash, single.weights_bytes) == (base.weights_hash, 2 * base.weights_bytes)
    templated = record_of({"source": "m", "engine": {"options": {"chat_template": "x"}}}, tmp_path)
    (tmp_path / "m" / "generation_config.json").write_text("{}")
    defaults = record_of({"source": "m"}, tmp_path)
    (tmp_path / "m" / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "m" / "config.json").read_text()) | {"rope_theta": 5e5})
    )
    turned = record_of({"source": "m"}, tmp_path)
    more = tmp_path / "m" / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("x")
    with_tools = record_of({"source": "m"}, tmp_path)
    records = (base, single, templated, defaults, turned, with_tools)
    assert len({record.model_hash for record in records}) == len(records)
    assert turned.weights_hash == base.weights_hash
    assert turned.kv_signature != defaults.kv_signature == base.kv_signature


def test_kv_of_another_form_or_another_computation_has_another_signature(tmp_path: Path) -> None:
    """Bytes that mean something else are nobody else's KV, whatever the weights (P2); a parser of tools changes none."""
    make_tiny("a", tmp_path / "m", seed=1)

    def signature(dtype: str = "bfloat16", **options: str | float) -> str:
        return record_of({"source": "m", "engine": {"dtype": dtype, "options": options}}, tmp_path).kv_signature

    plain = signature()
    assert signature(tool_call_parser="hermes") == plain
    others = [
        signature(kv_cache_dtype="fp8"),
        signature(kv_cache_dtype="fp8_e5m2"),
        signature(kv_cache_dtype="nvfp4"),
        signature(quantization="fp8"),
        signature(rope_theta=5e5),
        signature("float16", kv_cache_dtype="fp8"),
    ]
    assert len({plain, *others}) == 7
    assert signature(kv_cache_dtype="fp8_e4m3") == others[0]


def test_an_fp8_cache_with_scales_has_another_signature(tmp_path: Path) -> None:
    """Bytes of a cache whose scales the files bring are not those of one without (P2)."""
    make_tiny("a", tmp_path / "m", seed=1)

    def precision(**options: str) -> str:
        return record_of({"source": "m", "engine": {"options": options}}, tmp_path).kv_signature.split("-")[4]

    assert (precision(kv_cache_dtype="fp8"), precision()) == ("fp8", "bfloat16")
    header = json.dumps({"model.layers.0.self_attn.attn.k_scale": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}})
    (tmp_path / "m" / "scales.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    assert (precision(kv_cache_dtype="fp8"), precision()) == ("fp8_scaled", "bfloat16")
    engine = {"options": {"kv_cache_dtype": "fp8"}}
    with pytest.raises(ConfigError, match=r"spec\.kv.converted: the model's files bring scales"):
        record_of({"source": "m", "engine": engine, "kv": {"converted": True}}, tmp_path)


def test_only_a_lossy_codec_of_kv_makes_another_model(tmp_path: Path) -> None:
    """Text that may differ is behaviour; that KV is kept, or how it is packed without a loss, is not (PRO-3, KVC-5). What
    went through a lossy codec is nobody else's KV (P2)."""
    make_tiny("a", tmp_path / "m", seed=1)

    def made(**kv: Any) -> ModelRecord:
        return record_of({"source": "m", "kv": kv}, tmp_path)

    base = record_of({"source": "m"}, tmp_path)
    assert (base.kv_reuse, base.kv_codec) == (True, "none")
    same = [made(reuse=False), made(codec="lossless"), made(reuse=False, codec="fp8")]
    assert {record.model_hash for record in same} == {base.model_hash}
    assert len({record.model_hash for record in (base, made(codec="fp8"), made(codec="int4"))}) == 3
    assert {record.kv_signature for record in same} == {base.kv_signature}
    assert made(codec="int4").kv_signature == f"{base.kv_signature}-int4"
    verify_record(made(codec="fp8"))


def test_taking_converted_kv_makes_another_model(tmp_path: Path) -> None:
    """Text may differ by it (PRO-3), and what was converted is nobody else's KV (P2): off unless it is asked for."""
    make_tiny("a", tmp_path / "m", seed=1)

    def made(**kv: Any) -> ModelRecord:
        return record_of({"source": "m", "engine": {"options": {"kv_cache_dtype": "fp8"}}, "kv": kv}, tmp_path)

    base, takes, both = made(), made(converted=True), made(converted=True, codec="int4")
    assert (base.kv_converted, takes.kv_converted) == (False, True)
    wide = record_of({"source": "m"}, tmp_path).kv_signature
    assert takes.kv_signature == f"{wide.replace('bfloat16', 'fp8')}-converted"
    assert both.kv_signature == f"{takes.kv_signature}-int4"
    assert [takes_converted(one.kv_signature) for one in (base, takes, both, made(codec="int4"))] == [
        False,
        True,
        True,
        False,
    ]
    assert len({one.model_hash for one in (base, takes, both)}) == 3
    unused = made(converted=True, reuse=False)
    assert (unused.model_hash, unused.kv_signature) == (base.model_hash, base.kv_signature)
    for record in (takes, both, unused):
        verify_record(decode(encode(record), ModelRecord))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_record_is_verified_with_all_its_files(tmp_path: Path, file: str) -> None:
    """Each file that decides what the model answers is checked at load, and the error says what to do (PRO-3)."""
    make_tiny("a", tmp_path / "m", seed=1)
    record = record_of({"source": "m", "engine": {"options": {"seed": 3, "chat_template": "x"}}}, tmp_path)
    stored = decode(encode(record), ModelRecord)
    verify_record(stored)
    path = tmp_path / "m" / file
    if file.endswith(".json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"changed": 1}))
    else:
        path.write_bytes(path.read_bytes()[:-2] + b"zz")
    with pytest.raises(EngineError, match="changed since they were registered"):
        verify_record(stored)


def test_config_json_is_canonical(tmp_path: Path) -> None:
    """Another order of keys or other spaces in config.json is the same model."""
    make_tiny("a", tmp_path / "m", seed=1)
    before = record_of({"source": "m"}, tmp_path).model_hash
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(config.items()))))
    assert record_of({"source": "m"}, tmp_path).model_hash == before


def test_builtin_tiny_is_made_once(tmp_path: Path, cache: Path) -> None:
    """``builtin:tiny-<seed>`` needs no step before ``apply``."""
    record = record_of({"source": "builtin:tiny-7"}, tmp_path)
    assert record.source == str(cache / "models" / "tiny-7")
    written = (cache / "models" / "tiny-7" / "model.safetensors").stat()
    assert record_of({"source": "builtin:tiny-7"}, tmp_path) == record
    assert (cache / "models" / "tiny-7" / "model.safetensors").stat().st_ino == written.st_ino


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"source": "nowhere"}, "nowhere: no such directory"),
        ({"source": "org/name"}, "org/name: no such directory; name the folder that holds config.json"),
        ({"source": "org/name"}, "run 'hf download org/name --local-dir DIR' on each host.*builtin:smollm2"),
        ({"source": "builtin:gpt-9"}, "spec.source: unknown built-in model 'gpt-9'; use builtin:"),
        ({"source": "m", "engine": {"max_context_len": 4096}}, "max_context_len: 4096 is above the 2048 tokens"),
        (
            {"source": "m", "engine": {"kv_cache_bytes": "1MiB"}},
            "hold 992 tokens, but max_context_len is 2048; give at least",
        ),
        ({"source": "m", "engine": {"kv_cache_bytes": 10}}, "hold 0 tokens"),
        ({"source": "no-config"}, "config.json: no such file"),
        ({"source": "bad-config"}, "config.json: is not JSON"),
        ({"source": "no-tokenizer"}, "no tokenizer.json"),
        ({"engine": {"type": "simulated"}, "tokenizer": "nowhere"}, "spec.tokenizer: .* has no tokenizer.json"),
        ({"engine": {"type": "simulated", "options": {"weights_bytes": "1"}}}, "options.weights_bytes: expected a number"),
        ({"engine": {"type": "simulated", "options": {"kv_bytes_per_token": 0}}}, "options.kv_bytes_per_token"),
    ],
)
def test_bad_models_are_one_line(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    """What the files contradict is refused when the service is applied, not when an engine dies."""
    make_tiny("a", tmp_path / "m", seed=1)
    for name, file, text in (
        ("no-config", "config.json", None),
        ("bad-config", "config.json", "{"),
        ("no-tokenizer", "tokenizer.json", None),
    ):
        shutil.copytree(tmp_path / "m", tmp_path / name)
        (tmp_path / name / file).unlink()
        if text is not None:
            (tmp_path / name / file).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        record_of(spec, tmp_path)
    assert str(caught.value).startswith("a: ")
    assert str(caught.value).isprintable()


def test_the_smallest_kv_budget_that_the_error_names_is_accepted(tmp_path: Path) -> None:
    """The remedy of the error is true."""
    make_tiny("a", tmp_path / "m", seed=1)
    with pytest.raises(ConfigError, match="give at least 2129920 bytes"):
        record_of({"source": "m", "engine": {"kv_cache_bytes": 2129919}}, tmp_path)
    assert record_of({"source": "m", "engine": {"kv_cache_bytes": 2129920}}, tmp_path).kv_bytes == 2129920


def test_record_of_a_server(tmp_path: Path) -> None:
    """A foreign server is known by its URL and model name; it takes nothing of our devices unless its owner says so."""
    spec = {"source": "http://127.0.0.1:1/v1/", "model": "up", "engine": {"type": "openai_http", "max_context_len": 4096}}
    record = record_of(spec, tmp_path)
    assert (record.source, record.model_id, record.budget_bytes) == ("http://127.0.0.1:1/v1", "up", 0)
    assert record.engine_options == {"model": "up"}
    assert record.engine_type is EngineType.OPENAI_HTTP
    assert record.model_hash != record_of(spec | {"model": "other"}, tmp_path).model_hash
    assert record.model_hash == record_of(spec | {"source": "http://127.0.0.1:1/v1"}, tmp_path, name="b").model_hash
    assert record_of(spec | {"resources": {"baseline_memory_gb": 2}}, tmp_path).budget_bytes == 2 * 10**9


@pytest.mark.parametrize("engine", ["openai_http", "simulated"])
def test_a_record_says_what_the_model_is_for(tmp_path: Path, engine: str) -> None:
    """Its task is part of what it is; to say the default is to say nothing, so that older hashes stay."""
    spec = {"source": "http://127.0.0.1:1/v1"} if engine == "openai_http" else {}
    spec |= {"engine": {"type": engine, "max_context_len": 4096}}  # type: ignore[dict-item]
    plain, embeds = record_of(spec, tmp_path), record_of(spec | {"task": "embed"}, tmp_path)
    assert (plain.task, embeds.task) == (Task.GENERATE, Task.EMBED)
    assert record_of(spec | {"task": "generate"}, tmp_path) == plain
    assert embeds.model_hash != plain.model_hash


def test_an_embedding_model_of_files_is_verified_as_one(tmp_path: Path) -> None:
    """The same files are another model for another task, and a load checks exactly that one (PRO-3)."""
    make_tiny("a", tmp_path / "m", seed=1)
    plain, embeds = record_of({"source": "m"}, tmp_path), record_of({"source": "m", "task": "embed"}, tmp_path)
    assert (embeds.task, embeds.weights_hash) == (Task.EMBED, plain.weights_hash) and embeds.model_hash != plain.model_hash
    verify_record(embeds)
    verify_record(plain)
    with pytest.raises(EngineError, match="changed since"):
        verify_record(msgspec.structs.replace(embeds, task=Task.GENERATE))


def test_record_of_a_simulated_model(tmp_path: Path) -> None:
    """Its sizes are declared, and the engine sees only its own options."""
    options = {"weights_bytes": 1000, "kv_bytes_per_token": 16, "overhead_bytes": 5, "load_s": 0.5}
    engine = {"type": "simulated", "max_context_len": 320, "max_num_seqs": 2, "options": options}
    record = record_of({"engine": engine}, tmp_path)
    assert record.engine_options == {"load_s": 0.5}
    assert record.budget_bytes == 1000 + 5 + 21 * 32 * 16
    other = record_of({"engine": engine | {"options": options | {"load_s": 1.0}}}, tmp_path)
    assert other.model_hash != record.model_hash


def test_a_record_says_what_its_devices_are_charged_and_what_it_costs(tmp_path: Path) -> None:
    """Weights and KV are shared among the devices that a replica spans, the overhead is on each (PRO-4, SCH-3)."""
    engine = {"type": "simulated", "max_context_len": 320, "max_num_seqs": 2}
    options = {"weights_bytes": 1001, "kv_bytes_per_token": 16, "overhead_bytes": 5}
    costs = {"prefill_token_s": 2e-5, "step_const_s": 0.011, "step_request_s": 5.5e-5}
    resources = {"gpus": 4, "costs": {"h100-80gb": costs, "cpu": {"prefill_token_s": 1, "step_const_s": 2}}}
    record = record_of({"engine": engine | {"options": options}, "resources": resources}, tmp_path)
    assert record.gpus == 4 and record.budget_bytes == -(-(1001 + 21 * 32 * 16) // 4) + 5
    assert list(record.costs) == ["cpu", "h100-80gb"]
    assert record.costs["h100-80gb"] == StepCosts(**costs)
    assert record.costs["cpu"] == StepCosts(prefill_token_s=1, step_const_s=2)


def test_reading_json_that_is_no_object(tmp_path: Path) -> None:
    """Files of a model that hold something else are refused."""
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        hashing.read_json(tmp_path / "x.json")
