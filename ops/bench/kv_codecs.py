"""What the codecs of KV lose on a real model, and what they save: SmolLM2, real text, the codecs as the node runs them.

A passage's first tokens are computed once; their keys and values, rounded to bfloat16 as an engine keeps them, go through a
codec block by block; the model then goes on over them. Its loss on the passage's next tokens is compared, token by token,
with that over the untouched keys and values, so only the codec differs (the model computes in float32, and its own tokens
are not coded). What is compared is thus a request whose whole prefix comes back from disk.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.codec import codecs
from kvcache.codec import numbers as codec_numbers
from kvcache.codec.codecs import Levels
from kvcache.core.identity import KvSignature
from ops.bench.kv import KvBench
from profiles.smollm2 import NAME, ensure_smollm2
from subjects.errors import ConfigError

PASSAGES = 24
CURVE_PASSAGES = 6
PREFIX_TOKENS = 768
SCORED_TOKENS = 256
GREEDY_TOKENS = 32
BLOCK_SIZE = 32
THREADS = 2
TEXT = Path(__file__).parent / "data" / "austen.txt"
FORM = "layer,head,k:dim.token,v:token.dim"
SHIPPED = ("fp8", "int4")
CURVE: dict[str, Levels] = {
    "own steps, 16/16": Levels(16, 16, even_keys=False),
    "own steps, 22/20": Levels(22, 20, even_keys=False),
    "16/16": Levels(16, 16),
    "18/20": Levels(18, 20),
    "24/20": Levels(24, 20),
    "32/32": Levels(32, 32),
    "64/64": Levels(64, 64),
}
"""Levels of keys and values; ``own steps`` with 16 levels are the usual 4 bits."""


@dataclass(slots=True)
class _Tally:
    """What was seen of one way to code, passage by passage."""

    extra_loss: list[float] = field(default_factory=list)
    """Mean over a passage's tokens, in nats."""
    divergence: list[float] = field(default_factory=list)
    same_first: list[float] = field(default_factory=list)
    same_greedy: list[float] = field(default_factory=list)
    payload_bytes: int = 0
    raw_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def figures(self) -> dict[str, float | int]:
        """Changes in percent; the standard error is over passages."""
        mean = float(np.mean(self.extra_loss))
        error = float(np.std(self.extra_loss, ddof=1) / math.sqrt(len(self.extra_loss))) if len(self.extra_loss) > 1 else 0.0
        figures: dict[str, float | int] = {
            "saved_percent": round(100 * (1 - self.payload_bytes / self.raw_bytes), 2),
            "perplexity_change_percent": round(100 * math.expm1(mean), 3),
            "standard_error_percent": round(100 * error, 3),
            "divergence_nats": round(float(np.mean(self.divergence)), 6),
            "equal_most_likely": round(float(np.mean(self.same_first)), 4),
            "encode_mb_per_s": round(self.raw_bytes / self.encode_s / 1e6),
            "decode_mb_per_s": round(self.raw_bytes / self.decode_s / 1e6),
            "passages": len(self.extra_loss),
        }
        if self.same_greedy:
            figures["equal_greedy_tokens"] = round(float(np.mean(self.same_greedy)), 4)
        return figures


async def measure(bench: KvBench) -> dict[str, Any]:
    """``codec_loss``: of each shipped codec the bytes saved (of bfloat16), the change of perplexity with its standard error
    over passages, the divergence of the distributions of the next token (Kullback-Leibler, mean), the share of tokens whose
    most likely successor is the same, and the share of equal tokens when both go on greedily; ``codec_curve``: the same
    for other parameters.

    Raises:
        ConfigError: the text cannot be read or is too short; the model cannot be had.
    """
    return await asyncio.to_thread(_measure, bench)


def _measure(bench: KvBench) -> dict[str, Any]:
    model = _Model(ensure_smollm2(bench.say))
    windows = list(_windows(model, bench.text or TEXT, bench.seed))[:PASSAGES]
    if len(windows) < 2:
        raise ConfigError(
            f"{bench.text or TEXT}: too short; two passages of {PREFIX_TOKENS + SCORED_TOKENS} tokens are the least"
        )
    tallies = {name: _Tally() for name in (*SHIPPED, *CURVE)}
    lossless = _Tally()
    perplexities = []
    for number, window in enumerate(windows):
        if number % 4 == 0:
            bench.say(f"codecs: passage {number + 1} of {len(windows)}")
        blocks, followed = model.prefix(window[:PREFIX_TOKENS]), window[PREFIX_TOKENS:]
        coded: dict[str, list[bytes]] = {}
        for name, tally in tallies.items():
            if name in CURVE and number >= CURVE_PASSAGES:
                continue
            coded[name] = _through(model.signature, blocks, name, tally)
        plain, *scored = model.score([blocks, *coded.values()], followed)
        perplexities.append(float(plain.loss.mean()))
        for name, seen in zip(coded, scored, strict=True):
            tally = tallies[name]
            tally.extra_loss.append(float((seen.loss - plain.loss).mean()))
            tally.divergence.append(plain.divergence(seen))
            tally.same_first.append(float((plain.first == seen.first).mean()))
        _through(model.signature, blocks, "lossless", lossless)
        greedy = model.go_on([blocks, *(coded[name] for name in SHIPPED)], followed[0])
        for index, name in enumerate(SHIPPED, start=1):
            tallies[name].same_greedy.append(float((greedy[0] == greedy[index]).mean()))
    return {
        "codec_model": NAME,
        "codec_text": str((bench.text or TEXT).name),
        "codec_tokens_scored": len(windows) * SCORED_TOKENS,
        "codec_prefix_tokens": PREFIX_TOKENS,
        "codec_perplexity": round(math.exp(float(np.mean(perplexities))), 3),
        "codec_lossless_saved_percent": round(100 * (1 - lossless.payload_bytes / lossless.raw_bytes), 2),
        "codec_loss": {name: tallies[name].figures() for name in SHIPPED},
        "codec_curve": {name: tallies[name].figures() for name in CURVE},
    }


def _through(signature: KvSignature, blocks: Sequence[bytes], name: str, tally: _Tally) -> list[bytes]:
    """The blocks after a codec, and what that took."""
    coded = []
    for block in blocks:
        began_s = time.perf_counter()
        if name in CURVE:
            payload = codecs.encode_grouped(signature, block, CURVE[name])
        else:
            payload = codecs.encode(signature, block, name)
        encoded_s = time.perf_counter()
        room = bytearray(signature.block_bytes)
        codecs.decode(signature, payload, "int4" if name in CURVE else name, memoryview(room))
        tally.decode_s += time.perf_counter() - encoded_s
        tally.encode_s += encoded_s - began_s
        tally.payload_bytes += len(payload)
        tally.raw_bytes += len(block)
        coded.append(bytes(room))
    return coded


def _windows(model: _Model, path: Path, seed: int) -> Iterator[list[int]]:
    """Passages in an order that the seed draws. Sections begin with a line ``# title``; none spans two of them."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text ({type(error).__name__}); name another file") from None
    random = np.random.Generator(np.random.PCG64(seed))
    size = PREFIX_TOKENS + SCORED_TOKENS + 1
    windows = []
    for section in f"\n{text}".split("\n# "):
        tokens = model.tokens(section.partition("\n")[2])
        if len(tokens) >= size:
            first = int(random.integers(0, min(size, len(tokens) - size + 1)))
            windows += [tokens[start : start + size] for start in range(first, len(tokens) - size + 1, size)]
    for index in random.permutation(len(windows)):
        yield windows[index]


@dataclass(frozen=True, slots=True)
class _Scored:
    loss: Any
    """Of each token, nats."""
    first: Any
    """The most likely token at each place."""
    log_probabilities: Any

    def divergence(self, other: _Scored) -> float:
        """Kullback-Leibler, from ours to the other's, mean over tokens, nats."""
        ours = self.log_probabilities
        return float((ours.exp() * (ours - other.log_probabilities)).sum(-1).mean())


class _Model:
    """SmolLM2 in float32, with keys and values that come and go as blocks of an engine on a CPU."""

    def __init__(self, directory: Path) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is loaded: do not spin beside others
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(THREADS)
        self._torch, self._cache = torch, DynamicCache
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = self._model.config
        layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.signature = KvSignature(
            model=NAME,
            layers=layers,
            kv_heads=heads,
            head_size=dim,
            dtype="bfloat16",
            form=FORM,
            block_size=BLOCK_SIZE,
            block_bytes=2 * layers * heads * dim * BLOCK_SIZE * 2,
        )

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def prefix(self, tokens: Sequence[int]) -> list[bytes]:
        """The blocks of a prefix, each computed after those before it."""
        torch = self._torch
        with torch.inference_mode():
            out = self._model(torch.tensor([list(tokens)]), use_cache=True, logits_to_keep=1)
        layers = out.past_key_values.layers
        keys = torch.stack([layer.keys[0] for layer in layers]).bfloat16().view(torch.int16).numpy().view(np.uint16)
        values = torch.stack([layer.values[0] for layer in layers]).bfloat16().view(torch.int16).numpy().view(np.uint16)
        blocks = []
        for start in range(0, len(tokens), BLOCK_SIZE):
            block = np.zeros(self.signature.block_bytes // 2, np.uint16)
            of_keys, of_values = codec_numbers.parts(self.signature, block)
            of_keys.write(np.ascontiguousarray(keys[:, :, start : start + BLOCK_SIZE].swapaxes(2, 3)))
            of_values.write(np.ascontiguousarray(values[:, :, start : start + BLOCK_SIZE]))
            blocks.append(block.tobytes())
        return blocks

    def score(self, prefixes: Sequence[Sequence[bytes]], followed: Sequence[int]) -> list[_Scored]:
        """The loss of each token of ``followed`` but the first, over each of the prefixes, in one batch."""
        torch = self._torch
        tokens, wanted = torch.tensor([list(followed[:-1])] * len(prefixes)), torch.tensor(list(followed[1:]))[:, None]
        scored = []
        with torch.inference_mode():
            for logits in self._model(tokens, past_key_values=self._filled(prefixes)).logits:
                log_probabilities = torch.log_softmax(logits, -1)
                loss = -log_probabilities.gather(1, wanted)[:, 0]
                scored.append(_Scored(loss.numpy(), log_probabilities.argmax(-1).numpy(), log_probabilities))
        return scored

    def go_on(self, prefixes: Sequence[Sequence[bytes]], token: int) -> Any:
        """Greedy tokens after each prefix and ``token``, as a batch: ``[prefixes, GREEDY_TOKENS]``."""
        torch = self._torch
        cache = self._filled(prefixes)
        last = torch.full((len(prefixes), 1), token)
        said = []
        with torch.inference_mode():
            for _ in range(GREEDY_TOKENS):
                last = self._model(last, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
                said.append(last)
        return torch.cat(said, dim=1).numpy()

    def _filled(self, prefixes: Sequence[Sequence[bytes]]) -> Any:
        signature, torch = self.signature, self._torch
        shape = (len(prefixes), signature.layers, signature.kv_heads, len(prefixes[0]) * BLOCK_SIZE, signature.head_size)
        keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        outer = (signature.layers, signature.kv_heads)
        for row, blocks in enumerate(prefixes):
            for index, block in enumerate(blocks):
                of_keys, of_values = codec_numbers.parts(signature, codec_numbers.raw(block, "bfloat16"))
                place = slice(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
                wide = codec_numbers.widen(of_keys.read(), "bfloat16").reshape(*outer, signature.head_size, BLOCK_SIZE)
                keys[row, :, :, place] = wide.swapaxes(2, 3)
                wide = codec_numbers.widen(of_values.read(), "bfloat16").reshape(*outer, BLOCK_SIZE, signature.head_size)
                values[row, :, :, place] = wide
        cache = self._cache()
        for layer in range(signature.layers):
            of_layer = (np.ascontiguousarray(keys[:, layer]), np.ascontiguousarray(values[:, layer]))
            cache.update(torch.from_numpy(of_layer[0]), torch.from_numpy(of_layer[1]), layer)
        return cache
