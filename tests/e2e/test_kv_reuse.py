"""KV that outlives its engine, on real vLLM with SmolLM2: the same greedy tokens with and without it, wherever it lay.

Engines are forked from one template and take turns on their device, as in a pool. Each answer is compared with the one that
is computed under a salt of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from kvcache.core.identity import SPAN_TOKENS
from profiles.smollm2 import ensure_smollm2
from profiles.tokenizer import ModelTokenizer
from subjects.ids import ReplicaId
from subjects.messages import Endpoint
from tests.e2e.engines import replica_spec
from tests.e2e.forking import Forked, fork, subreaping
from tests.e2e.kv_nodes import NodeProcess
from tests.servers import NatsServer
from workers.template import Template

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

BLOCK = 32
SALT, OTHER = "aa" * 16, "bb" * 16
INDEX_S = 0.5
"""Nodes tell each other what they hold every 0.2 s."""
PROMPTS_MAX = 12
KV_BYTES = 96 * 1024 * 1024
STORY = (
    "The old lighthouse stood where the river meets the sea. Every evening its keeper, a quiet woman called Marta, climbed "
    "the hundred and twelve steps, wound the clock that turned the lamp, and wrote a line into the book that lay beside it. "
)


class Engine:
    """A replica's engine in a process of its own."""

    def __init__(self, forked: Forked) -> None:
        self.forked = forked
        self._plain = 0

    async def do(self, command: str, **fields: Any) -> dict[str, Any]:
        answer = await self.forked.ask(json.dumps({"do": command, **fields}))
        assert "error" not in answer, answer["error"]
        return answer

    async def ask(self, prompt: Sequence[int], salt: str = SALT, **fields: Any) -> tuple[list[int], int]:
        """The tokens of its answer, and how many tokens of its prompt were not computed."""
        answer = await self.do("ask", prompt=list(prompt), salt=salt, **fields)
        assert answer["failure"] == ""
        return answer["token_ids"], answer["cached"]

    async def computed(self, prompt: Sequence[int], **fields: Any) -> list[int]:
        """What it says when it has to compute all of the prompt."""
        self._plain += 1
        tokens, cached = await self.ask(prompt, f"{os.getpid():016x}{id(self) % 2**32:08x}{self._plain:08x}", **fields)
        assert cached == 0
        return tokens


class Stage:
    """The nodes and engines of this module."""

    def __init__(self, template: Template, source: Path, directory: Path, nats: str) -> None:
        self.template = template
        self.source = source
        self.directory = directory
        self.nats = nats
        self.nodes: list[NodeProcess] = []
        self.engines: list[Engine] = []
        self.tokenizer = ModelTokenizer(source)

    def node(self, name: str, **fields: Any) -> NodeProcess:
        node = NodeProcess(self.directory / name, f"worker-{name}", nats=self.nats, **fields)
        self.nodes.append(node)
        node.start()
        return node

    async def engine(self, node: NodeProcess) -> Engine:
        spec = replica_spec(
            str(self.source), name="smollm2", kv_bytes=KV_BYTES, max_num_seqs=4, kv_signature="smollm2-f32-b32"
        )
        spec = msgspec.structs.replace(
            spec,
            replica=ReplicaId(f"replica-{len(self.engines):010d}"),
            kv_socket=node.socket,
            turns_directory=str(self.directory / "turns"),
            threads=2,
        )
        engine = Engine(await fork(self.template, spec))
        self.engines.append(engine)
        started = await engine.do("start")
        assert started["has_connector"]
        return engine

    async def end(self, engine: Engine, *, kill: bool = False) -> None:
        self.engines.remove(engine)
        if kill:
            os.kill(engine.forked.pid, signal.SIGKILL)
            await engine.forked.wait()
        else:
            await engine.forked.exit(json.dumps({"do": "exit"}))

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.prompts(Endpoint.COMPLETIONS, {"prompt": text})[0]

    async def close(self) -> None:
        for engine in list(self.engines):
            await self.end(engine)
        for node in self.nodes:
            node.stop()


@pytest.fixture(autouse=True)
def no_child_is_left() -> None:
    """Tests start nodes and engines for those that follow; what is left over is looked for once, at the end."""


@pytest.fixture(scope="module")
def subreaper() -> Iterator[None]:
    """This process is the parent of what the template forks, and none of it is left at the end."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with subreaping():
        yield
    _gone, alive = psutil.wait_procs(
        [child for child in psutil.Process().children(recursive=True) if child.pid not in before], timeout=5
    )
    assert not alive, f"left running: {alive}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    subreaper: None, shared_nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    """The template, and what the tests start."""
    source = await asyncio.to_thread(ensure_smollm2)
    template = Template("tests.e2e.kv_engine:run")
    await template.start()
    stage = Stage(template, source, tmp_path_factory.mktemp("kv"), shared_nats_server.url)
    yield stage
    await stage.close()
    await template.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first_node(stage: Stage) -> NodeProcess:
    return stage.node("first")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def second_node(stage: Stage, first_node: NodeProcess) -> NodeProcess:
    """On the same bus."""
    return stage.node("second")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first(stage: Stage, first_node: NodeProcess) -> Engine:
    """The first replica on the first node."""
    return await stage.engine(first_node)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def story(stage: Stage, first: Engine) -> tuple[list[int], list[int]]:
    """A prompt of five blocks and its answer, computed by the first replica, which saved it under ``SALT``."""
    prompt = stage.tokens(STORY * 6)[: 5 * BLOCK + 25]
    answer = await first.computed(prompt)
    assert await first.ask(prompt) == (answer, 0)
    return prompt, answer


def reusable(prompt: Sequence[int]) -> int:
    """Tokens of whole blocks, but for the last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


async def test_the_same_replica_after_its_own_cache_was_reset(first: Engine, story: tuple[list[int], list[int]]) -> None:
    """The blocks come back from the node, and the client's ``cached_tokens`` count them (KVC-6)."""
    prompt, answer = story
    before = await first.do("counts")
    assert (await first.do("reset"))["done"]
    assert await first.ask(prompt) == (answer, reusable(prompt))
    after = await first.do("counts")
    assert after["loaded"] - before["loaded"] == 5
    assert after["not_loaded"] == 0
    assert await first.ask(prompt) == (answer, reusable(prompt))  # now from the engine's own
    assert (await first.do("counts"))["loaded"] == after["loaded"]


async def test_a_prefix_in_part_a_short_prompt_and_a_whole_number_of_blocks(
    stage: Stage, first: Engine, story: tuple[list[int], list[int]]
) -> None:
    """Only whole blocks from the start are reused; a prompt under a block has none; one token is always computed."""
    prompt, _ = story
    question = stage.tokens(" What did Marta do when the storm came?")
    cases = [
        (prompt[: 3 * BLOCK + 7] + question, 3 * BLOCK),
        (prompt[: BLOCK - 1], 0),
        (prompt[: 4 * BLOCK], 3 * BLOCK),
        (question + prompt, 0),
    ]
    for tokens, cached in cases:
        answer = await first.computed(tokens)
        await first.do("reset")
        assert await first.ask(tokens) == (answer, cached)


async def test_an_answer_is_a_prefix_too(stage: Stage, first: Engine, story: tuple[list[int], list[int]]) -> None:
    """The next turn of a conversation finds the answer's blocks; so does a continuation after tokens were sent (REL-2)."""
    prompt, _ = story
    answer = await first.computed(prompt, tokens=40)
    assert (await first.ask(prompt, tokens=40))[0] == answer
    turn = prompt + answer + stage.tokens(" And then?")
    follow = await first.computed(turn)
    await first.do("reset")
    assert await first.ask(turn) == (follow, (len(prompt) + 39) // BLOCK * BLOCK)
    await first.do("reset")
    rest, cached = await first.ask(prompt, sent=answer[:20], tokens=40)
    assert rest == answer[20:]
    assert cached == len(prompt)  # of the client's prompt; the tokens that were sent are reused too, and are none of it


async def test_tenants_are_apart(first: Engine, story: tuple[list[int], list[int]]) -> None:
    """Another salt finds nothing of the first one's, then its own; the same prompt, the same answer (O3)."""
    prompt, answer = story
    await first.do("reset")
    assert await first.ask(prompt, OTHER) == (answer, 0)
    await first.do("reset")
    assert await first.ask(prompt, OTHER) == (answer, reusable(prompt))
    await first.do("reset")
    assert await first.ask(prompt, SALT) == (answer, reusable(prompt))


async def test_log_probabilities_of_a_prompt_are_computed(first: Engine, story: tuple[list[int], list[int]]) -> None:
    """Such a request reuses nothing, is answered, and leaves the tiers as they are."""
    prompt, answer = story
    await first.do("reset")
    assert await first.ask(prompt, echo=True, logprobs=1) == (answer, 0)


async def test_what_a_client_says_of_kv_is_ignored(first: Engine, story: tuple[list[int], list[int]]) -> None:
    """Neither a salt in the body nor parameters of a connector get to the engine: B has nothing of A's (O3)."""
    prompt, answer = story
    await first.do("reset")
    told = await first.ask(prompt, "cd" * 16, cache_salt=SALT, vllm_xargs={"kv_transfer_params": "x"})
    assert told == (answer, 0)


async def test_a_second_engine_with_tiers_in_a_process_is_refused(first: Engine) -> None:
    """vLLM keeps one connector per process; a second engine would read into the tensors of the first."""
    answer = await first.forked.ask(json.dumps({"do": "second"}))
    assert "runs in this process already" in answer["error"]


async def test_several_requests_at_once(first: Engine, story: tuple[list[int], list[int]]) -> None:
    """Requests with one prefix load it once, end with the right text each, and with all pages free."""
    prompt, answer = story
    await first.do("reset")
    free = (await first.do("load"))["free"]
    before = (await first.do("counts"))["loaded"]
    names = [(await first.do("send", prompt=prompt, salt=SALT))["name"] for _ in range(4)]
    answers = [await first.do("answer", name=name) for name in names]
    assert [each["token_ids"] for each in answers] == [answer] * 4
    assert all(each["cached"] == reusable(prompt) for each in answers)
    assert (await first.do("counts"))["loaded"] - before == reusable(prompt) // BLOCK
    assert (await first.do("load"))["free"] == free


async def test_another_replica_and_its_successors(
    stage: Stage, first_node: NodeProcess, story: tuple[list[int], list[int]]
) -> None:
    """On the same node: another replica, the one after a kill -9, and the one after an orderly unload (KVC-6)."""
    prompt, answer = story
    fresh = stage.tokens("Written by the replica that dies: ") + prompt
    second = await stage.engine(first_node)
    assert await second.ask(prompt) == (answer, reusable(prompt))
    told = await second.ask(fresh)
    await stage.end(second, kill=True)
    third = await stage.engine(first_node)
    assert await third.ask(fresh) == (told[0], reusable(fresh))
    fresh = stage.tokens("Written by the replica that is unloaded: ") + prompt
    told = await third.ask(fresh)
    await stage.end(third)
    fourth = await stage.engine(first_node)
    assert await fourth.ask(fresh) == (told[0], reusable(fresh))
    await stage.end(fourth)


async def test_a_replica_on_another_node(stage: Stage, first: Engine, second_node: NodeProcess) -> None:
    """Its node pulls the blocks from the first one, over the index and the data path, in whole spans (KVC-4).

    The index may take a moment, and what was computed meanwhile is there already: so other prompts until one was known.
    """
    engine = await stage.engine(second_node)
    prompt: list[int] = []
    cached = 0
    for attempt in range(PROMPTS_MAX):
        prompt = stage.tokens(f"Told in one place and asked in another, {attempt}: " + STORY * 8)[: SPAN_TOKENS + 40]
        answer, _ = await first.ask(prompt)
        await asyncio.sleep(INDEX_S)
        tokens, cached = await engine.ask(prompt)
        assert tokens == answer
        if cached:
            break
    assert SPAN_TOKENS <= cached <= reusable(prompt)
    assert (await second_node.stats()).pulled_blocks >= SPAN_TOKENS // BLOCK
    await stage.end(engine)


# What breaks between ``prepare`` and the read costs time, never text, pages or the engine.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(stage: Stage) -> NodeProcess:
    return stage.node("faulty", directory=str(stage.directory / "store"), settle_s=0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(stage: Stage, node: NodeProcess) -> Engine:
    return await stage.engine(node)


async def held(engine: Engine, prompt: Sequence[int]) -> str:
    """A request whose load waits for its read."""
    await engine.do("reset")
    await engine.do("hold")
    name: str = (await engine.do("send", prompt=list(prompt), salt=SALT))["name"]
    assert (await engine.do("held_read"))["held"]
    return name


async def test_an_aborted_load_gives_its_pages_back(engine: Engine, story: tuple[list[int], list[int]]) -> None:
    """The client leaves while its prefix is being loaded, and while the read hangs: all pages are free again (E5)."""
    prompt, answer = story
    assert await engine.ask(prompt) == (answer, 0)
    await engine.do("reset")
    free = (await engine.do("load"))["free"]
    for _ in range(3):
        name = await held(engine, prompt)
        await engine.do("abort", name=name)
        loads = [await engine.do("load")]
        while loads[-1]["free"] != free and len(loads) < 200:
            await asyncio.sleep(0.05)
            loads.append(await engine.do("load"))
        assert (loads[-1]["free"], loads[-1]["running"], loads[-1]["waiting"]) == (free, 0, 0)
        await engine.do("release")
    assert (await engine.do("reset"))["done"]
    tokens, cached = await engine.ask(prompt)
    assert (tokens, cached) == (answer, reusable(prompt))


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_the_node_is_gone_before_the_read(
    stage: Stage, node: NodeProcess, engine: Engine, story: tuple[list[int], list[int]], fault: str
) -> None:
    """The prompt is computed, at once and not counted as cached; later requests too; when it is back, so is reuse."""
    prompt, answer = story
    if fault == "killed":
        prompt = stage.tokens("The node dies. ") + prompt
        answer = await engine.computed(prompt)
    await engine.ask(prompt)
    free = (await engine.do("load"))["free"]
    name = await held(engine, prompt)
    node.kill() if fault == "killed" else node.signal(signal.SIGSTOP)
    await engine.do("release")
    told = await engine.do("answer", name=name)
    assert (told["token_ids"], told["cached"]) == (answer, 0)
    await engine.do("reset")
    assert await engine.ask(prompt) == (answer, 0)
    if fault == "killed":
        node.start()
    else:
        node.signal(signal.SIGCONT)
    assert (await engine.do("load"))["free"] == free

    async def reused() -> bool:
        await engine.do("reset")
        tokens, cached = await engine.ask(prompt)
        assert tokens == answer
        return cached == reusable(prompt)

    for _ in range(40):
        if await reused():
            break
        await asyncio.sleep(0.25)
    else:
        pytest.fail(f"no reuse after the node came back: {node.log()}")


async def test_corrupted_files_are_computed_again(
    stage: Stage, node: NodeProcess, engine: Engine, story: tuple[list[int], list[int]]
) -> None:
    """Every page of the store has a flipped bit: the answer is right, nothing counts as cached, the node counts it."""
    prompt = stage.tokens("What is written here goes to disk. ") + story[0]
    answer = await engine.computed(prompt)
    await engine.ask(prompt)
    node.stop()
    files = sorted((stage.directory / "store").rglob("*.kvc"))
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        for at in range(5000, len(data), 16 * 1024):
            data[at] ^= 4
        path.write_bytes(data)
    node.start()
    await engine.do("reset")
    tokens, cached = await engine.ask(prompt)
    assert (tokens, cached) == (answer, 0)


async def test_the_engine_still_lives(engine: Engine, story: tuple[list[int], list[int]]) -> None:
    """After all of it."""
    assert await engine.computed(story[0]) == story[1]
    assert await until_idle(engine)


async def until_idle(engine: Engine) -> bool:
    """Whether nothing runs or waits."""
    load = await engine.do("load")
    return bool(load["running"] == 0 and load["waiting"] == 0)
