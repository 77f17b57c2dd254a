"""The two halves of the engine's connector without an engine: what is loaded, saved and told, and what failures leave."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from kvcache.engine.orders import KvRequest, LoadBlocks, SaveBlocks, StepNews, StepOrders, TellUsed  # noqa: E402
from kvcache.engine.scheduler import ON_ITS_WAY_S, SchedulerSide  # noqa: E402
from kvcache.engine.worker import AWAY_S, STALL_S, Loader, Ring, Saver, WorkerSide  # noqa: E402
from kvcache.errors import KvUnavailable  # noqa: E402
from kvcache.wire.messages import KvUse  # noqa: E402
from profiles.blocks import chain_hashes  # noqa: E402
from subjects.errors import DecodeError  # noqa: E402

BLOCK = 4
SALT = b"s" * 16
USE = KvUse(tenant="a", request="r")
ROW = 8
WAIT_S = 20.0


# ------------------------------------------------------------------------------------------------ the scheduler's half


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(name: str = "r", tokens: int = 18, *, ready: int = 0, asked: bool = True, **fields: Any) -> Any:
    """vLLM's request, as far as the connector looks at it. Token ids are 0, 1, 2 ..."""
    values: dict[str, Any] = {
        "request_id": name,
        "all_token_ids": list(range(tokens)),
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "cache_salt": SALT.hex(),
        "kv_transfer_params": KvRequest(ready=ready, asked=asked, use=USE).params(),
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "pooling_params": None,
        "prompt_embeds": None,
        "mm_features": [],
        "prefill_stats": None,
    }
    made = _Request()
    for key, value in (values | fields).items():
        setattr(made, key, value)
    return made


class _Request(SimpleNamespace):
    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Scheduler:
    """Steps of vLLM's scheduler around the half under test; request r's blocks are 10, 11, 12 ..."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.side = SchedulerSide(BLOCK, clock=self.clock)

    def step(self, *scheduled: tuple[Any, int]) -> StepOrders:
        orders = self.side.orders({each.request_id: tokens for each, tokens in scheduled}, lambda _: range(10, 200))
        for each, tokens in scheduled:
            each.num_computed_tokens += tokens
        return orders

    def load(self, each: Any, local_tokens: int = 0) -> LoadBlocks:
        tokens = self.side.loadable(each, local_tokens)
        assert tokens is not None
        self.side.allocated(each, range(10, 10 + (local_tokens + tokens) // BLOCK), tokens)
        (load,) = self.step().loads
        return load


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def hashes(tokens: int) -> list[bytes]:
    return chain_hashes(range(tokens), BLOCK, SALT)


def test_what_is_ready_is_loaded_and_nothing_else(scheduler: Scheduler) -> None:
    """Whole blocks beyond the engine's own, as many as the node said, never the last token of a prompt (KVC-6)."""
    offered = {}
    for ready in (0, 1, 3, 4, 9):
        one = request(f"r{ready}", 16, ready=ready)
        scheduler.side.came(one)
        offered[ready] = [scheduler.side.loadable(one, local) for local in (0, 4, 8, 12)]
    assert offered == {0: [0] * 4, 1: [4, 0, 0, 0], 3: [12, 8, 4, 0], 4: [12, 8, 4, 0], 9: [12, 8, 4, 0]}
    longer = request("longer", 17, ready=4)
    scheduler.side.came(longer)
    assert scheduler.side.loadable(longer, 0) == 16
    short = request("short", 3, ready=1)
    scheduler.side.came(short)
    assert scheduler.side.loadable(short, 0) == 0


def test_a_load_names_the_blocks_behind_the_engines_own(scheduler: Scheduler) -> None:
    """Its hashes and block ids start where the engine's own prefix ends; the second call of vLLM orders nothing."""
    one = request(tokens=18, ready=4)
    scheduler.side.came(one)
    load = scheduler.load(one, local_tokens=4)
    assert load == LoadBlocks(
        request="r", salt=SALT, hashes=tuple(hashes(16)[1:]), block_ids=(11, 12, 13), deadline_s=KvRequest().deadline_s
    )
    assert scheduler.side.loadable(one, 4) == 0  # not twice while it is under way
    scheduler.side.allocated(one, range(10, 15), 0)
    assert scheduler.step().loads == []


def test_blocks_are_saved_as_they_fill(scheduler: Scheduler) -> None:
    """Prompt and answer alike, each once, with its parent; what the node has already is not sent again."""
    one = request(tokens=18, ready=2)
    scheduler.side.came(one)
    one.num_computed_tokens = 8
    first = scheduler.step((one, 10))
    assert [(save.first, save.parent, save.hashes, save.block_ids) for save in first.saves] == [
        (2, hashes(8)[-1], tuple(hashes(16)[2:]), (12, 13))
    ]
    saves = []
    for token in range(18, 25):
        one.all_token_ids.append(token)
        saves += scheduler.step((one, 1)).saves
    assert [(save.first, save.block_ids) for save in saves] == [(4, (14,)), (5, (15,))]
    assert saves[1].parent == saves[0].hashes[0] == hashes(20)[-1]


def test_tokens_that_are_not_known_yet_are_not_saved(scheduler: Scheduler) -> None:
    """With asynchronous scheduling a block may be computed before its last token is known: it is saved a step later."""
    one = request(tokens=7)
    scheduler.side.came(one)
    assert [save.first for save in scheduler.step((one, 8)).saves] == [0]
    one.all_token_ids.append(7)
    assert [save.first for save in scheduler.step((one, 1)).saves] == [1]


def test_two_requests_with_one_prefix_send_it_once(scheduler: Scheduler) -> None:
    """Also when the second comes before the first one's blocks are at the node; a shared block in the middle is left out."""
    one, two = request("one"), request("two")
    scheduler.side.came(one)
    assert [len(save.hashes) for save in scheduler.step((one, 18)).saves] == [4]
    scheduler.side.came(two)
    assert scheduler.step((two, 18)).saves == []
    third = request("three", asked=False)
    scheduler.side.heard(StepNews(lost=[hashes(16)[0], hashes(16)[2], hashes(16)[3]]))
    scheduler.side.came(third)
    assert [(save.first, len(save.hashes)) for save in scheduler.step((third, 18)).saves] == [(0, 1), (2, 2)]


def test_what_the_node_no_longer_has_is_sent_again(scheduler: Scheduler) -> None:
    """The node's own answer is believed, but for blocks that may still be on their way; after it broke off nothing is."""
    one = request("one")
    scheduler.side.came(one)
    scheduler.step((one, 18))
    scheduler.clock.now_s += ON_ITS_WAY_S + 1
    two = request("two", ready=1)
    scheduler.side.came(two)
    assert [(save.first, len(save.hashes)) for save in scheduler.step((two, 18)).saves] == [(1, 3)]
    scheduler.side.heard(StepNews(away=True))
    three = request("three", asked=False)
    scheduler.side.came(three)
    assert [len(save.hashes) for save in scheduler.step((three, 18)).saves] == [4]


def test_a_failed_load_is_computed_and_not_tried_again(scheduler: Scheduler) -> None:
    """The client's cached tokens count what came, and the request is offered no second load (no loop)."""
    told: dict[str, int] = {}
    stats = SimpleNamespace(num_prompt_tokens=18, set=lambda **values: told.update(values))
    one = request(tokens=18, ready=4, prefill_stats=stats)
    scheduler.side.came(one)
    scheduler.load(one, local_tokens=4)
    scheduler.side.heard(StepNews(loaded={"r": 1, "gone": 3}), {"r", "gone"})
    assert told == {"num_prompt_tokens": 18, "num_local_cached_tokens": 4, "num_external_cached_tokens": 4}
    assert scheduler.side.loadable(one, 0) == 0
    assert scheduler.side.failed_loads == 1


def test_a_whole_load_may_be_followed_by_another(scheduler: Scheduler) -> None:
    """A request that was preempted after its load is offered the same blocks again."""
    one = request(tokens=18, ready=4)
    scheduler.side.came(one)
    scheduler.load(one)
    scheduler.side.heard(StepNews(loaded={"r": 4}), {"r"})
    assert scheduler.side.loadable(one, 0) == 16


def test_a_load_of_several_shards_is_what_its_poorest_brought(scheduler: Scheduler) -> None:
    """One shard ends whole, another later and short: the request has what both have, and is offered no second load."""
    told: dict[str, int] = {}
    stats = SimpleNamespace(num_prompt_tokens=18, set=lambda **values: told.update(values))
    one = request(tokens=18, ready=4, prefill_stats=stats)
    scheduler.side.came(one)
    scheduler.load(one)
    scheduler.side.heard(StepNews(loaded={"r": 4}))
    assert scheduler.side.loadable(one, 0) == 0  # the other shard's is still under way
    scheduler.side.heard(StepNews(loaded={"r": 1}), {"r"})
    assert (told["num_external_cached_tokens"], scheduler.side.failed_loads, scheduler.side.loadable(one, 0)) == (4, 1, 0)


def test_what_one_request_loads_others_wait_for(scheduler: Scheduler) -> None:
    """A popular prefix is loaded once: who comes meanwhile is asked again, and loads what the engine lacks then."""
    first, longer = request("first", 10, ready=2), request("longer", 18, ready=4)
    for one in (first, longer):
        scheduler.side.came(one)
    scheduler.load(first)
    assert scheduler.side.loadable(longer, 0) is None
    assert scheduler.side.loadable(longer, 8) == 8  # what the engine has itself needs nobody's load
    other = request("other", 18, ready=4, cache_salt=(b"t" * 16).hex())
    scheduler.side.came(other)
    assert scheduler.side.loadable(other, 0) == 16
    scheduler.side.heard(StepNews(loaded={"first": 2}), {"first"})
    assert scheduler.side.loadable(longer, 8) == 8


@pytest.mark.parametrize("end", ["aborted", "failed"])
def test_a_load_that_brought_nothing_holds_nobody_up(scheduler: Scheduler, end: str) -> None:
    """Who waited for it loads the blocks itself once it is over, whether its client left or its node failed (E5)."""
    first, second = request("first", ready=4), request("second", ready=4)
    for one in (first, second):
        scheduler.side.came(one)
    scheduler.load(first)
    if end == "aborted":
        scheduler.side.ended(first)
    assert scheduler.side.loadable(second, 0) is None
    scheduler.side.heard(StepNews(loaded={"first": 0}), {"first"})
    assert scheduler.side.loadable(second, 0) == 16


def test_an_aborted_load_tells_of_no_use(scheduler: Scheduler) -> None:
    """A client that left while its prefix was being loaded used nothing; its request is forgotten once (E5)."""
    one = request("one", 18, ready=4)
    scheduler.side.came(one)
    scheduler.load(one)
    one.num_computed_tokens = 16
    scheduler.side.ended(one)
    scheduler.side.ended(one)
    scheduler.side.heard(StepNews(loaded={"one": 4}), {"one"})
    assert (scheduler.step().used, scheduler.side.requests) == ([], 0)


def test_an_end_tells_what_was_used_and_for_how_long(scheduler: Scheduler) -> None:
    """One use for each request, of all it computed or found, with its latency (KVC-2); the next step carries it."""
    one = request("one", 18)
    scheduler.side.came(one)
    scheduler.step((one, 18))
    scheduler.clock.now_s += 0.5
    scheduler.side.ended(one)
    (used,) = scheduler.step().used
    assert (used.hashes, used.use.latency_s, used.use.tenant) == (tuple(hashes(16)), 0.5, "a")


NO_TEXT = SimpleNamespace(prompt_logprobs=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": None},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_transfer_params": {"carpool": {"ready": "many"}}},
        {"cache_salt": "not hex"},
        {"sampling_params": NO_TEXT},
        {"sampling_params": None},
        {"pooling_params": object()},
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
    ],
    ids=["none", "foreign", "broken", "salt", "prompt logprobs", "no sampling", "pooling", "image", "embeddings"],
)
def test_requests_without_tiers(scheduler: Scheduler, fields: dict[str, Any]) -> None:
    """Where tokens do not name the KV, or nobody asked: nothing is loaded, saved or told, and nothing breaks."""
    one = request(**({"ready": 4} | fields))
    scheduler.side.came(one)
    assert scheduler.side.loadable(one, 0) == 0
    orders = scheduler.step((one, 18))
    scheduler.side.ended(one)
    assert (orders.loads, orders.saves, scheduler.step().used) == ([], [], [])


def test_tenants_do_not_share_hashes(scheduler: Scheduler) -> None:
    """Equal tokens under another salt are other blocks (O3)."""
    one, two = request("one"), request("two", cache_salt=(b"t" * 16).hex())
    for each in (one, two):
        scheduler.side.came(each)
    (first,), (second,) = scheduler.step((one, 18)).saves, scheduler.step((two, 18)).saves
    assert not {*first.hashes} & {*second.hashes}
    assert (first.salt, second.salt) == (SALT, b"t" * 16)


def test_parameters_survive_the_way_through_vllm() -> None:
    """They are plain values there, and only ours are read."""
    mine = KvRequest(ready=3, asked=True, deadline_s=0.5, use=USE)
    assert KvRequest.of(mine.params()) == mine
    assert KvRequest.of({"other": 1}) is None
    assert KvRequest.of("x") is None
    with pytest.raises(DecodeError):
        KvRequest.of({"carpool": {"ready": []}})


def test_orders_and_news_cross_processes() -> None:
    """vLLM pickles them between its scheduler and workers that are processes of their own."""
    load = LoadBlocks("r", SALT, (b"h",), (1,), 1.0)
    orders = StepOrders(loads=[load], saves=[SaveBlocks(SALT, b"", 0, (b"h",), (1,), USE)], used=[TellUsed(SALT, (), USE)])
    news = StepNews(loaded={"r": 1}, lost=[b"h"], away=True)
    near, far = multiprocessing.Pipe()
    with near, far:
        near.send((orders, news))
        assert far.recv() == (orders, news)


# -------------------------------------------------------------------------------------------------- the worker's half


class Rows:
    """What torch gives: rows of bytes that ``numpy()`` shows."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def numpy(self) -> Any:
        return self.array

    def __getitem__(self, some: slice) -> Rows:
        return Rows(self.array[some])


class _Over:
    def wait(self) -> None:
        pass


class FakeBlocks:
    """An engine with 64 blocks of 8 bytes: block n holds n times eight."""

    block_bytes = ROW

    def __init__(self) -> None:
        self.held = np.repeat(np.arange(64, dtype=np.uint8)[:, None], ROW, axis=1)

    def rows(self, count: int) -> Any:
        return Rows(np.zeros((count, ROW), dtype=np.uint8))

    def save(self, block_ids: Sequence[int], rows: Any) -> _Over:
        rows.array[:] = self.held[list(block_ids)]
        return _Over()

    def mark(self) -> object:
        return None

    def load(self, block_ids: Sequence[int], rows: Any, after: object) -> None:
        self.held[list(block_ids)] = rows.array


class FakeClient:
    """The node in memory. ``gate`` holds answers up while it is not set; ``away`` makes every call fail."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, bytes], bytes] = {}
        self.told: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.away = False
        self.keeps = 1000

    def _call(self) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        if self.away:
            raise KvUnavailable("away")

    def read(self, salt: bytes, hashes: Sequence[bytes], into: memoryview) -> int:
        self._call()
        rows = into.cast("B")
        for index, block in enumerate(hashes):
            row = self.blocks.get((salt, block))
            if row is None:
                return index
            rows[index * ROW : (index + 1) * ROW] = row
        return len(hashes)

    def write(
        self, salt: bytes, parent: bytes, hashes: Sequence[bytes], data: memoryview, use: KvUse, *, first: int = 0
    ) -> int:
        self._call()
        raw = data.cast("B")
        for index, block in enumerate(hashes[: self.keeps]):
            self.blocks[salt, block] = bytes(raw[index * ROW : (index + 1) * ROW])
        self.told.append((parent, first, len(hashes)))
        return min(len(hashes), self.keeps)

    def used(self, salt: bytes, hashes: Sequence[bytes], use: KvUse) -> None:
        self._call()
        self.told.append(("used", len(hashes)))

    def emptied(self) -> None:
        self._call()
        self.told.append("emptied")

    def close(self) -> None:
        pass


def reached(condition: Callable[[], object]) -> None:
    """Waits for what another thread does; never measures how long it takes."""
    tick = threading.Event()
    for _ in range(int(WAIT_S * 200)):
        if condition():
            return
        tick.wait(0.005)
    raise AssertionError("the thread did not get there")


def gathered(source: Callable[[], Any]) -> Any:
    """What ``source`` gives once it gives something."""
    found: list[Any] = []

    def look() -> bool:
        found.append(source())
        return bool(found[-1])

    reached(look)
    return found[-1]


CHAIN = tuple(hashes(40))


def load_of(name: str, count: int = 4, first_block: int = 20, deadline_s: float = 1000.0) -> LoadBlocks:
    return LoadBlocks(name, SALT, CHAIN[:count], tuple(range(first_block, first_block + count)), deadline_s)


def save_of(count: int = 4, first: int = 0) -> SaveBlocks:
    parent = CHAIN[first - 1] if first else b""
    return SaveBlocks(SALT, parent, first, CHAIN[first : first + count], tuple(range(first, first + count)), USE)


@pytest.fixture
def client() -> Iterator[FakeClient]:
    client = FakeClient()
    client.blocks = {(SALT, block): bytes([100 + index] * ROW) for index, block in enumerate(CHAIN)}
    yield client
    client.gate.set()


def test_a_load_brings_blocks_in_pieces(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row gets to its block, over several reads, and the load is reported once."""
    monkeypatch.setattr("kvcache.engine.worker.PIECE_BYTES", 3 * ROW)
    blocks, woken = FakeBlocks(), threading.Event()
    loader = Loader(blocks, client)
    loader.wake = woken.set
    loader.start(load_of("r", 8), None)
    assert woken.wait(WAIT_S)
    ((order, done),) = loader.over()
    assert (order.request, done, loader.over(), loader.open) == ("r", 8, [], 0)
    assert [int(row[0]) for row in blocks.held[20:29]] == [*range(100, 108), 28]
    loader.close()


@pytest.mark.parametrize("fault", ["missing", "away"])
def test_a_short_load_reports_what_is_missing(client: FakeClient, fault: str) -> None:
    """The blocks that came count; the others are named as failed once, so that vLLM computes them (E5)."""
    if fault == "missing":
        del client.blocks[SALT, CHAIN[2]]
    client.away = fault == "away"
    worker = WorkerSide(FakeBlocks(), lambda: client, 1000)
    worker.start_loads(StepOrders(loads=[load_of("r")]))
    ended = gathered(worker.ended_loads)
    come = 2 if fault == "missing" else 0
    assert (ended, worker.failed_blocks(), worker.failed_blocks()) == ({"r"}, {*range(20 + come, 24)}, set())
    assert worker.news().loaded == {"r": come}
    assert (worker.counts.loaded, worker.counts.not_loaded, worker.counts.failed_loads) == (come, 4 - come, 1)
    worker.close()


@pytest.mark.parametrize("bound", ["stall", "deadline"])
def test_a_frozen_node_holds_no_request_up(client: FakeClient, bound: str) -> None:
    """The load ends at its bound; what the node sends later is written nowhere, and loads behind it fail at once (E5)."""
    clock, blocks = Clock(), FakeBlocks()
    loader = Loader(blocks, client, clock=clock)
    client.gate.clear()
    loader.start(load_of("r", deadline_s=0.1 if bound == "deadline" else 1000.0), None)
    assert client.entered.wait(WAIT_S)
    assert loader.over() == []
    clock.now_s += 0.11 if bound == "deadline" else STALL_S + 0.01
    ((order, done),) = loader.over()
    assert (order.request, done) == ("r", 0)
    loader.start(load_of("behind", first_block=40), None)
    assert [(order.request, done) for order, done in loader.over()] == [("behind", 0)]
    client.gate.set()
    reached(lambda: loader._current is None)
    assert (blocks.held[20:24] == np.arange(20, 24)[:, None]).all()  # the given-up load wrote nothing
    assert (blocks.held[40:44] == np.arange(40, 44)[:, None]).all()
    loader.close()


def test_after_a_freeze_loads_work_again(client: FakeClient) -> None:
    """Once the thread is out of its read, the next load is read (REL-3)."""
    clock, blocks = Clock(), FakeBlocks()
    loader = Loader(blocks, client, clock=clock)
    client.gate.clear()
    loader.start(load_of("r"), None)
    assert client.entered.wait(WAIT_S)
    clock.now_s += STALL_S + 0.01
    assert len(loader.over()) == 1
    client.gate.set()
    reached(lambda: loader._current is None)
    loader.start(load_of("again"), None)
    found = gathered(loader.over)
    assert [(order.request, done) for order, done in found] == [("again", 4)]
    loader.close()


def test_saves_reach_the_node_with_their_place(client: FakeClient) -> None:
    """Rows are what the blocks held at the step's end, whatever later steps write into them."""
    blocks = FakeBlocks()
    saver = Saver(blocks, client, 1000)
    client.gate.clear()
    client.blocks.clear()
    saver.save(save_of(3))
    saver.save(save_of(2, first=3))
    blocks.held[:] = 255
    client.gate.set()
    reached(saver.idle)
    assert client.told == [(b"", 0, 3), (CHAIN[2], 3, 2)]
    assert [client.blocks[SALT, block][0] for block in CHAIN[:5]] == [0, 1, 2, 3, 4]
    assert saver.counts.saved == 5
    saver.close()


def test_a_full_staging_area_skips_and_goes_on(client: FakeClient) -> None:
    """A node that is too slow costs saves, counted and told to the scheduler's half; no call waits for it."""
    saver = Saver(FakeBlocks(), client, 8 * ROW)
    client.gate.clear()
    client.blocks.clear()
    saver.save(save_of(6))
    saver.save(save_of(4, first=6))
    assert saver.counts.skipped_full == 2
    assert saver.news() == ([*CHAIN[8:10]], False)
    client.gate.set()
    reached(saver.idle)
    saver.save(save_of(2, first=8))
    reached(saver.idle)
    assert saver.counts.saved == 10
    saver.close()


def test_a_node_that_is_away_costs_no_copies(client: FakeClient) -> None:
    """After it broke off, blocks are not even copied for a second; then saves are tried again."""
    clock, blocks = Clock(), FakeBlocks()
    saver = Saver(blocks, client, 1000, clock=clock)
    client.away = True
    saver.save(save_of(2))
    reached(saver.idle)
    reached(lambda: saver.counts.skipped_away == 2)
    assert saver.news() == ([*CHAIN[:2]], True)
    saver.save(save_of(3))
    assert (saver.counts.skipped_away, saver.idle()) == (5, True)
    client.away = False
    clock.now_s += AWAY_S + 0.1
    saver.save(save_of(2))
    reached(lambda: saver.counts.saved == 2)
    saver.close()


def test_what_the_node_does_not_keep_is_lost_news(client: FakeClient) -> None:
    """A full host tier keeps some leading blocks: the others may be sent again another time."""
    client.keeps = 1
    saver = Saver(FakeBlocks(), client, 1000)
    saver.save(save_of(3))
    reached(lambda: saver.counts.skipped_away == 2)
    assert saver.news() == ([*CHAIN[1:3]], False)
    saver.close()


def test_uses_and_resets_are_told_in_order(client: FakeClient) -> None:
    """An engine's reset reaches the node (F8), after what came before it."""
    worker = WorkerSide(FakeBlocks(), lambda: client, 1000)
    worker.start_saves(StepOrders(saves=[save_of(1)], used=[TellUsed(SALT, CHAIN[:2], USE)], emptied=True))
    reached(lambda: len(client.told) == 3)
    assert client.told == [(b"", 0, 1), ("used", 2), "emptied"]
    worker.close()


def test_an_end_flushes_what_waits(client: FakeClient) -> None:
    """A replica that stops loses nothing that it had copied (KVC-6)."""
    client.blocks.clear()
    worker = WorkerSide(FakeBlocks(), lambda: client, 1000)
    worker.start_saves(StepOrders(saves=[save_of(4)]))
    worker.close()
    assert len(client.blocks) == 4


def test_a_ring_gives_rows_that_lie_together() -> None:
    """It never hands out a row twice, and wraps without a gap."""
    ring = Ring(5)
    assert [ring.take(3), ring.take(3), ring.take(1)] == [(0, 3), (3, 2), (0, 0)]
    ring.give(3)
    assert [ring.take(9), ring.taken] == [(0, 3), 5]


def test_shards_agree_on_the_least() -> None:
    """A block of a replica that spans devices is there when all of them have it."""
    one = StepNews(loaded={"a": 3, "b": 1}, lost=[b"x"])
    other = StepNews(loaded={"a": 2, "c": 4}, away=True)
    assert one.merged(other) == StepNews(loaded={"a": 2, "b": 1, "c": 4}, lost=[b"x"], away=True)
