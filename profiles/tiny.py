"""Tiny models with random weights, for tests and demonstrations: real files, a real engine, and noise for answers.

The files are written by hand (numpy and JSON), so that this takes a fraction of a second and needs no torch. Each says that
its weights are random: in ``config.json``, in ``README.md``, and in ``carpool.json``, from where the record gets it.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from profiles.model_files import byte_symbols, tokenizer_json, write_json, write_llama
from subjects.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VOCABULARY = 384
"""256 bytes, 4 special tokens, and fragments of common words: any text encodes."""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said what "
    "its about than into them can only other time new some could these two may first then do any like my now over "
    "such our man me even most made after"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class _Size(msgspec.Struct, frozen=True):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


SIZES: Mapping[str, _Size] = {
    "tiny": _Size(hidden=128, intermediate=256, layers=2, heads=4, kv_heads=4),
    "small": _Size(hidden=256, intermediate=768, layers=6, heads=8, kv_heads=4),
    "medium": _Size(hidden=512, intermediate=1536, layers=12, heads=8, kv_heads=4),
}
"""About 427,000, 5 million and 38 million parameters."""


def make_tiny(name: str, directory: Path, *, seed: int, size: str = "tiny", max_context_len: int = 2048) -> Path:
    """Writes a random Llama into ``directory`` (made; what was there is replaced as a whole) and returns it.

    The same ``seed``, ``size`` and ``max_context_len`` give the same weights; ``name`` is only a label.

    Raises:
        ConfigError: an unknown size, or ``directory`` is something else than such a model.
    """
    if size not in SIZES:
        raise ConfigError(f"size: unknown size {size!r}; use one of: {', '.join(SIZES)}")
    if seed < 0:
        raise ConfigError("seed: must not be negative; use 0 or more")
    if max_context_len < 16:
        raise ConfigError("max_context_len: must be at least 16; use for example 2048")
    ours = not directory.exists() or (directory / "carpool.json").is_file()
    if not ours and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: holds something else; name a new directory")
    # Built beside its place and renamed, so that nobody ever sees half a model.
    building = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
    try:
        building.mkdir(parents=True)
        _write(building, name, seed, SIZES[size], max_context_len)
        if directory.exists():
            old = directory.with_name(f"{building.name}.old")
            directory.rename(old)
            building.rename(directory)
            shutil.rmtree(old)
        else:
            building.rename(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror}); check the path") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


def _write(directory: Path, name: str, seed: int, size: _Size, max_context_len: int) -> None:
    config = {
        "carpool_random_weights_seed": seed,
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.hidden // size.heads,
        "max_position_embeddings": max_context_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    special_ids = {"bos_token": 256, "eos_token": 258, "pad_token": 259}
    write_llama(directory, _weights(seed, size), config, special_ids, _tokenizer(), CHAT_TEMPLATE)
    write_json(directory / "carpool.json", {"name": name, "random_weights": True, "seed": seed})
    (directory / "README.md").write_text(
        f"# {name}\n\nA Llama with **random weights** (seed {seed}), made by Carpool for tests and demonstrations.\n"
        "It was never trained: its answers are noise, on purpose.\n",
        encoding="utf-8",
    )


# ------------------------------------------------------------------------------------------------------------- weights


def _weights(seed: int, size: _Size) -> dict[str, NDArray[np.float32]]:
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(seed))
    kv_width = size.hidden // size.heads * size.kv_heads

    def normal(rows: int, columns: int, scale: float) -> NDArray[np.float32]:
        return generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)

    # Width 0 of the residual stream is a constant that no layer writes to. It is a bias for the output layer, which has
    # none of its own, and there it keeps the model from bytes that are no text and from special tokens: answers are then
    # ASCII noise of the length asked for, instead of replacement characters that a stream holds back.
    embedding = normal(VOCABULARY, size.hidden, 1.0)
    embedding[:, 0] = 4.0
    tensors = {"model.embed_tokens.weight": embedding}
    scale = size.hidden**-0.5
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}."
        for part, rows, columns in (
            ("self_attn.q_proj", size.hidden, size.hidden),
            ("self_attn.k_proj", kv_width, size.hidden),
            ("self_attn.v_proj", kv_width, size.hidden),
            ("self_attn.o_proj", size.hidden, size.hidden),
            ("mlp.gate_proj", size.intermediate, size.hidden),
            ("mlp.up_proj", size.intermediate, size.hidden),
            ("mlp.down_proj", size.hidden, size.intermediate),
        ):
            matrix = normal(rows, columns, columns**-0.5)
            if part in ("self_attn.o_proj", "mlp.down_proj"):
                matrix[0, :] = 0.0
            tensors[f"{prefix}{part}.weight"] = matrix
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{part}.weight"] = np.ones(size.hidden, dtype=np.float32)
    tensors["model.norm.weight"] = np.ones(size.hidden, dtype=np.float32)
    output = normal(VOCABULARY, size.hidden, 3.0 * scale)
    output[:, 0] = 0.0
    text = [0x0A, *range(0x20, 0x7F), *range(256 + len(_SPECIAL), VOCABULARY)]
    output[[token for token in range(VOCABULARY) if token not in text], 0] = -16.0
    tensors["lm_head.weight"] = output
    return tensors


# ----------------------------------------------------------------------------------------------------------- tokenizer


def _tokenizer() -> dict[str, Any]:
    symbols = byte_symbols()
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    vocabulary |= {token: 256 + index for index, token in enumerate(_SPECIAL)}
    merges: list[list[str]] = []
    for word in _WORDS.split():
        left = symbols[0x20]
        for letter in word:
            merged = left + letter
            if merged not in vocabulary:
                if len(vocabulary) == VOCABULARY:
                    return tokenizer_json(vocabulary, merges, _SPECIAL)
                vocabulary[merged] = len(vocabulary)
                merges.append([left, letter])
            left = merged
    raise AssertionError("too few words to fill the vocabulary")
