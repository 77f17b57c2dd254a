"""The vLLM engine on the CPU with LoRA adapters: loaded at first use, evicted, never mixed up, and the base as it was."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from subjects.messages import Adapter, Endpoint, FailureKind
from tests.adapters import ALL_MODULES, ALPHA, adapter_at, make_adapter
from tests.e2e.engines import Answer, Driver, replica_spec
from tests.waiting import until
from workers.engines.vllm_cpu import VllmEngine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:::vllm"),
    pytest.mark.filterwarnings("ignore:::xgrammar"),
]

QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a long story of one fox. " * 12}],
    "temperature": 0,
    "max_tokens": 24,
    "ignore_eos": True,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(tiny_model: Path) -> AsyncIterator[Driver]:
    """One engine with room for one adapter."""
    environment = dict(os.environ)
    engine = VllmEngine(replica_spec(str(tiny_model), adapters_max=1, adapters_rank_max=8))
    await engine.start()
    await engine.warm(4)
    driver = Driver(engine)
    yield driver
    await driver.close()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    """Two different ones."""
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        make_adapter(tiny_model, directory / name, seed=seed)
    return {name: adapter_at(tiny_model, directory / name, name) for name in "ab"}


def resident(driver: Driver) -> tuple[str, ...]:
    """What our own slots hold; vLLM must hold as many."""
    engine = driver.engine
    assert isinstance(engine, VllmEngine)
    names = engine._gate.resident
    assert len(engine._engine.list_loras()) == len(names)
    return names


async def test_each_adapter_says_its_own_and_the_base_is_as_before(driver: Driver, adapters: dict[str, Adapter]) -> None:
    """One slot, three voices: an adapter is evicted for the next, comes back, and says the same; the base never changes."""
    base = await driver.ask(QUESTION)
    first = {name: await driver.ask(QUESTION, adapter=adapter) for name, adapter in adapters.items()}
    assert resident(driver) == ("b",)
    again = {name: await driver.ask(QUESTION, adapter=adapter) for name, adapter in adapters.items()}
    assert len({base.text(), first["a"].text(), first["b"].text()}) == 3
    assert [again[name].token_ids() for name in "ab"] == [first[name].token_ids() for name in "ab"]
    assert (await driver.ask(QUESTION)).token_ids() == base.token_ids()
    for answer in (base, *first.values(), *again.values()):
        answer.check()
        assert answer.finish_reason() == "length"


async def test_an_adapter_answers_as_its_weights_merged_into_the_base_do(
    driver: Driver, tiny_model: Path, tmp_path: Path
) -> None:
    """Token for token what transformers say with ``W + alpha / rank * B @ A`` in each kind of layer, embedding and head
    too, while requests for the base run in the same steps and answer as the base."""
    directory = make_adapter(tiny_model, tmp_path / "all", seed=3, rank=8, strength=0.06, modules=ALL_MODULES)
    prompt = list(range(20, 60))
    body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    adapter = adapter_at(tiny_model, directory, "all")
    sent = [driver.send(body, Endpoint.COMPLETIONS, adapter=each) for each in (adapter, None, adapter, None)]
    answers = [(await driver.wait(request)).token_ids() for request in sent]
    merged, base = await asyncio.to_thread(lambda: (greedy(tiny_model, prompt, directory), greedy(tiny_model, prompt)))
    assert answers == [merged, base, merged, base]
    assert merged != base


def greedy(model: Path, prompt: list[int], adapter: Path | None = None) -> list[int]:
    """30 tokens by transformers, in float32."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        weights, parts = network.state_dict(), load_file(adapter / "adapter_model.safetensors")
        for name in [name for name in parts if "lora_A" in name or "lora_embedding_A" in name]:
            a, b = parts[name].float(), parts[name.replace("_A", "_B")].float()
            change = (b @ a) * ALPHA / a.shape[0]
            module = name.removeprefix("base_model.model.").split(".lora_")[0]
            weights[f"{module}.weight"] += change.T if "embedding" in name else change
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(30):
            ids = torch.cat([ids, network(ids).logits[:, -1:].argmax(-1)], dim=1)
    return [int(token) for token in ids[0, len(prompt) :]]


async def test_an_answer_of_an_adapter_is_continued(driver: Driver, adapters: dict[str, Adapter]) -> None:
    """After the tokens already sent come those of the unbroken answer (REL-2), with another adapter in the slot before."""
    whole = (await driver.ask(QUESTION, adapter=adapters["a"])).token_ids()
    await driver.ask(QUESTION, adapter=adapters["b"])
    rest = await driver.ask(QUESTION, adapter=adapters["a"], sent_token_ids=tuple(whole[:8]))
    rest.check(first_index=8)
    assert rest.token_ids() == whole[8:]


async def test_a_cached_prefix_is_of_one_adapter_only(driver: Driver, adapters: dict[str, Adapter]) -> None:
    """Of the same prompt and salt nothing is reused across adapters or between one and the base; within each it is."""
    voices = (None, adapters["a"], adapters["b"])
    first = [await driver.ask(QUESTION, adapter=each, cache_salt="prefixes") for each in voices]
    again = [await driver.ask(QUESTION, adapter=each, cache_salt="prefixes") for each in voices]
    assert [answer.usage.cached_tokens for answer in first] == [0, 0, 0]
    assert all(answer.usage.cached_tokens >= 32 for answer in again)


async def test_requests_for_more_adapters_than_slots_all_end(driver: Driver, adapters: dict[str, Adapter]) -> None:
    """Eight at once for two adapters and the base, with one slot: each gets the answer that it gets alone."""
    alone = {name: (await driver.ask(QUESTION, adapter=adapter)).token_ids() for name, adapter in adapters.items()}
    base = (await driver.ask(QUESTION)).token_ids()
    wanted = ["a", "b", "", "a", "b", "b", "", "a"]
    sent = [driver.send(QUESTION, adapter=adapters.get(name)) for name in wanted]
    answers = [await driver.wait(request) for request in sent]
    assert [answer.token_ids() for answer in answers] == [alone[name] if name else base for name in wanted]


async def test_one_that_is_aborted_while_it_waits_for_its_adapter_leaves_no_trace(
    driver: Driver, adapters: dict[str, Adapter]
) -> None:
    """It never runs, and the adapter in the slot goes on to serve."""
    long = QUESTION | {"max_tokens": 200}
    running = driver.send(long, adapter=adapters["a"])
    await until(lambda: driver.answers[running].deltas)
    waiting = driver.send(QUESTION, adapter=adapters["b"])
    await asyncio.sleep(0.05)
    driver.engine.abort(waiting, 1)
    (await driver.wait(running)).check()
    assert (await driver.ask(QUESTION, adapter=adapters["a"])).finish_reason() == "length"
    assert driver.answers[waiting].deltas == []
    assert resident(driver) == ("a",)


def refused(answer: Answer) -> tuple[FailureKind, str]:
    """Why one request was not answered with its adapter."""
    failure = answer.failure
    assert failure is not None
    assert (failure.param, failure.code) == ("model", "adapter_unavailable")
    assert "/" not in failure.message, "no paths"
    return failure.kind, failure.message


async def test_an_adapter_that_cannot_be_used_fails_its_own_requests(
    driver: Driver, adapters: dict[str, Adapter], tiny_model: Path, tmp_path: Path
) -> None:
    """Missing files, changed files, what vLLM itself refuses, a rank above the bound: only the last is the client's fault,
    the others may do elsewhere; the rest goes on."""
    alone = (await driver.ask(QUESTION, adapter=adapters["a"])).token_ids()
    missing = Adapter(name="gone", source=str(tmp_path / "gone"), adapter_hash="0", rank=4)
    changed = make_adapter(tiny_model, tmp_path / "changed", seed=9)
    as_applied = adapter_at(tiny_model, changed, "changed")
    make_adapter(tiny_model, changed, seed=10)
    initial = make_adapter(tiny_model, tmp_path / "pissa", seed=11, init_lora_weights="pissa")
    unserved = adapter_at(tiny_model, initial, "pissa")
    too_wide = Adapter(name="wide", source=str(tmp_path), adapter_hash="0", rank=16)
    answers = [await driver.ask(QUESTION, adapter=each) for each in (missing, as_applied, unserved, too_wide)]
    assert [refused(answer) for answer in answers] == [
        (FailureKind.SICK, "the files of adapter 'gone' are missing on this worker"),
        (FailureKind.SICK, "the files of adapter 'changed' changed since it was applied; it has to be applied again"),
        (FailureKind.SICK, "the engine does not load the adapter 'pissa'; the worker's log says why"),
        (FailureKind.BAD_REQUEST, "the adapter 'wide' has rank 16, and this replica takes 8 at most"),
    ]
    assert (await driver.ask(QUESTION, adapter=adapters["a"])).token_ids() == alone


async def test_an_adapter_that_is_replaced_in_place_never_answers_as_it_was(
    driver: Driver, tiny_model: Path, tmp_path: Path
) -> None:
    """Same name, same directory, same prompt, other files: other weights and no cached prefix of the old ones."""
    directory = make_adapter(tiny_model, tmp_path / "x", seed=5)
    old = await driver.ask(QUESTION, adapter=adapter_at(tiny_model, directory, "x"))
    make_adapter(tiny_model, directory, seed=6)
    new = await driver.ask(QUESTION, adapter=adapter_at(tiny_model, directory, "x"))
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    elsewhere = await driver.ask(QUESTION, adapter=adapter_at(tiny_model, copy, "y"))
    assert old.token_ids() != new.token_ids() == elsewhere.token_ids()
    assert (new.usage.cached_tokens, elsewhere.usage.cached_tokens) == (0, 0)
