"""Writing a model directory by hand: safetensors, a byte-level BPE tokenizer, JSON. Needs numpy and nothing heavier."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def write_json(path: Path, value: object) -> None:
    """An indented JSON file in UTF-8."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_bfloat16(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """A safetensors file in bfloat16: eight bytes of header length, the header in JSON, the data in order of names."""
    import numpy as np

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        size_bytes = 2 * tensors[name].size
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            bits = np.ascontiguousarray(tensors[name], dtype=np.float32).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
            file.write(rounded.astype("<u2").tobytes())
        file.flush()
        os.fsync(file.fileno())


def write_llama(
    directory: Path,
    tensors: Mapping[str, NDArray[np.float32]],
    config: Mapping[str, Any],
    special_ids: Mapping[str, int],
    tokenizer: Mapping[str, Any],
    chat_template: str,
) -> None:
    """The files of a Llama in bfloat16: weights, configuration, tokenizer and template. ``config`` has what differs from one
    to another, ``special_ids`` the tokens that ``bos_token`` and its like are."""
    ids = {f"{name}_id": special_ids[name] for name in ("bos_token", "eos_token", "pad_token")}
    texts = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    same = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "dtype": "bfloat16"}
    write_bfloat16(directory / "model.safetensors", tensors)
    write_json(directory / "config.json", {"architectures": ["LlamaForCausalLM"], **same, **config, **ids})
    write_json(directory / "generation_config.json", ids)
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: texts[number] for name, number in special_ids.items()},
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": chat_template,
        },
    )


def byte_symbols() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself where it is visible, else one above U+00FF."""
    symbols: list[str] = []
    shifted = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + shifted))
            shifted += 1
    return symbols


def tokenizer_json(
    vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], special: Iterable[str], *, single_digits: bool = False
) -> dict[str, Any]:
    """The content of ``tokenizer.json`` for a byte-level BPE; ``special`` tokens are in the vocabulary too.

    ``single_digits`` keeps digits apart from each other and from what is beside them.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocabulary[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in special
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]} if single_digits else byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(vocabulary),
            "merges": [list(merge) for merge in merges],
        },
    }
