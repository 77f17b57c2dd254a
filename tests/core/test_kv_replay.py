"""The replay of traces against the order of eviction and others (issue's hit ratios; SPEC KVC-1)."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.bench.kv_replay import SHARES, TRACE, Replayed, belady, compare, distinct, lfu, lru, read_trace, replay, replayed
from subjects.errors import ConfigError


def path_of(*names: str) -> list[bytes]:
    """Blocks of one prompt."""
    return [name.encode() for name in names]


@pytest.fixture(scope="module")
def slice_of_trace() -> list[Replayed]:
    """Six minutes of the conversation trace."""
    return read_trace(TRACE)[:1250]


@pytest.mark.parametrize("share", SHARES)
def test_ours_finds_at_least_what_lru_finds_on_a_slice(slice_of_trace: list[Replayed], share: float) -> None:
    """Issue: at least LRU at each size, and nothing beats the bound."""
    hits = compare(slice_of_trace, share)
    assert hits["ours"].ratio >= hits["lru"].ratio
    assert all(one.ratio <= hits["belady"].ratio for one in hits.values())


def test_the_report_has_all_sizes_and_the_costs_of_the_rules_of_time(slice_of_trace: list[Replayed]) -> None:
    """Issue: figures at 1, 5 and 20 % of the working set beside the unlimited cache."""
    report = replayed(slice_of_trace[:400], lambda line: None)
    assert list(report["sizes"]) == ["1%", "5%", "20%"]
    assert report["working_set_blocks"] == distinct(slice_of_trace[:400])
    for size in report["sizes"].values():
        assert set(size["ours_with_rules_of_time"]) == {"young_30_s", "idle_600_s", "both"}
        assert 0 <= size["all"]["lru"] <= size["all"]["belady"] <= report["unlimited"]["all"]


def synthetic(seed: int, requests: int) -> list[Replayed]:
    """System prompts drawn by Zipf, conversations that go on after half a minute or so, and long prompts that come once."""
    random = np.random.Generator(np.random.PCG64(seed))
    weights = 1.0 / np.arange(1, 41)
    due: list[tuple[float, list[bytes], int]] = []
    made: list[Replayed] = []
    now_s, fresh = 0.0, 0

    def new(count: int) -> list[bytes]:
        nonlocal fresh
        fresh += count
        return [f"x{number}".encode() for number in range(fresh - count, fresh)]

    while len(made) < requests:
        now_s += float(random.exponential(0.5))
        due.sort()
        if due and due[0][0] <= now_s:
            _, blocks, left = due.pop(0)
            blocks = [*blocks, *new(2)]
        elif random.random() < 0.4:
            made.append(Replayed(now_s, new(30)))
            continue
        else:
            prompt = int(random.choice(40, p=weights / weights.sum()))
            blocks, left = [*(f"p{prompt}-{depth}".encode() for depth in range(6)), *new(3)], int(random.integers(0, 6))
        made.append(Replayed(now_s, blocks))
        if left:
            due.append((now_s + float(random.exponential(30.0)), blocks, left - 1))
    return made


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("share", "gain"), [(0.01, 1.15), (0.05, 1.1), (0.2, 1.0)])
def test_scans_do_not_wash_out_what_is_shared(seed: int, share: float, gain: float) -> None:
    """Issue: where LRU is known to be bad (prompts that come once between those that come again) ours is well above it."""
    hits = compare(synthetic(seed, 2000), share)
    assert hits["ours"].ratio >= gain * hits["lru"].ratio


def most_hits(requests: Sequence[list[bytes]], blocks_max: int) -> int:
    """The best that can be done, by trying everything that may be kept."""
    best: dict[frozenset[bytes], int] = {frozenset(): 0}
    for blocks in requests:
        after: dict[frozenset[bytes], int] = {}
        for held, hits in best.items():
            found = next((depth for depth, block in enumerate(blocks) if block not in held), len(blocks))
            there = sorted(held | set(blocks))
            for size in range(min(blocks_max, len(there)) + 1):
                for kept in combinations(there, size):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, 0), hits + found)
        best = after
    return max(best.values())


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_belady_is_the_most_that_any_rule_can_reach(picks: list[int], blocks_max: int) -> None:
    """Issue: the bound is exact, also for prefixes, and the other rules stay below it."""
    tree = [path_of("a"), path_of("a", "b"), path_of("a", "b", "c"), path_of("a", "d"), path_of("e"), path_of("e", "f")]
    tree += [path_of("g"), path_of("a", "b", "h")]
    paths = [tree[pick] for pick in picks]
    requests = [Replayed(float(number), blocks) for number, blocks in enumerate(paths)]
    blocks = sum(len(one) for one in paths)
    reached = replay(requests, belady(requests, blocks_max)).ratio * blocks
    assert round(reached) == most_hits(paths, blocks_max)
    for rule in (lru, lfu):
        assert replay(requests, rule(blocks_max)).ratio * blocks <= reached + 1e-9


def test_a_trace_of_ones_own_may_be_plain_or_packed(tmp_path: Path) -> None:
    """Issue: other files of the same form; further fields are ignored."""
    text = b'{"timestamp": 1500, "input_length": 700, "hash_ids": [3, 4]}\n{"timestamp": 2000, "hash_ids": [3, 5]}\n'
    (tmp_path / "a.jsonl").write_bytes(text)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(text)
    plain, packed = read_trace(tmp_path / "a.jsonl"), read_trace(tmp_path / "a.jsonl.gz")
    assert plain == packed
    assert [(one.time_s, len(one.blocks)) for one in plain] == [(1.5, 2), (2.0, 2)]
    assert replay(plain, lru(3)).ratio == 0.25


@pytest.mark.parametrize("text", [b"", b"{}\n", b'{"timestamp": 0, "hash_ids": [-1]}\n', b"\x1f\x8b"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: bytes) -> None:
    """House rule: a wrong file is an error of configuration, not a traceback."""
    (tmp_path / "a.jsonl").write_bytes(text)
    with pytest.raises(ConfigError, match=r"a\.jsonl"):
        read_trace(tmp_path / "a.jsonl")
