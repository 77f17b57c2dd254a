"""Layouts: shares of time, what fits where, what is carried, and that every change can be taken back (SCH-3)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.core.plan.layout import Layout, Score, cramped_lack
from broker.core.plan.problem import Block, Need, Prices, Problem, Site
from broker.core.plan.search import Search
from broker.core.plan.sharing import served_share, share_of_all, share_of_time
from subjects.ids import DeviceId, ReplicaId, WorkerId
from tests.core.scheduler_world import deployment

GB = 1_000_000_000
H100, A100 = "h100", "a100"


def site(number: int, *, group: str = "", kind: str = H100, gb: float = 80, residents: int = 2) -> Site:
    """A device."""
    return Site((WorkerId("w"), DeviceId(f"gpu{number}")), group, kind, int(gb * GB), residents)


def need(name: str, load: float = 0.5, gb: float = 20, **changes: object) -> Need:
    """What a model wants."""
    fields: dict[str, object] = {"model": deployment(name), "load": load, "bytes_min": int(gb * GB), "rates": {H100: 1.0}}
    return Need(**(fields | changes))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- shares of time


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], 1.0),  # Alone.
        ([0.0], 1.0),  # Beside one that sleeps.
        ([0.2], 1.0 - 0.03 * 0.4 - 0.2),  # The other gets all it wants; taking turns costs its part of the time.
        ([1.0], 0.97 / 2),  # Two that always work.
        ([0.5], 0.97 / 2),
        ([1.0, 1.0], 0.97 / 3),
        ([0.1, 1.0], (0.97 - 0.1) / 2),  # What the small one leaves is for the two others alike.
        ([1.0, 0.1], (0.97 - 0.1) / 2),
    ],
)
def test_share_of_time_beside_others(others: list[float], expected: float) -> None:
    """Max-min fairness on what each wants, less what taking turns costs (SCH-7, decision 0008)."""
    assert share_of_time(others, 0.97) == pytest.approx(expected)


usages = st.lists(st.floats(0.0, 1.0), max_size=5)


@settings(max_examples=60, deadline=None)
@given(usages, st.integers(0, 4), st.floats(0.0, 1.0))
def test_share_of_time_lies_between_an_equal_part_and_all_and_falls_with_what_others_use(
    others: list[float], which: int, more: float
) -> None:
    """Never above 1, never below an equal part, whoever the others are, and never more beside one that uses more."""
    share = share_of_time(list(others), 0.97)
    assert 0.97 / (len(others) + 1) - 1e-9 <= share <= 1.0
    assert share_of_time([*others, more], 0.97) <= share + 1e-9
    if others:
        busier = list(others)
        busier[which % len(others)] = max(busier[which % len(others)], more)
        assert share_of_time(busier, 0.97) <= share + 1e-9
    assert share_of_time(sorted(others, reverse=True), 0.97) == share


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.0),
        ([0.485, 1.0, 1.0, 1.0], 0.485),  # The slowest decides.
        ([0.8, 1.0], 0.8),
        ([0.8, 0.8], 0.485 + (0.8 - 0.485) * 0.8),  # Above an equal part both must be free at once.
        ([0.3, 0.9], 0.3),
    ],
)
def test_share_of_all_devices_at_once(shares: list[float], expected: float) -> None:
    """A tensor-parallel replica is as fast as the slowest of its devices, at most (SCH-1)."""
    assert share_of_all(shares, 0.97) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=4), st.integers(0, 3), st.floats(0.1, 1.0))
def test_share_of_all_is_at_most_the_least_and_grows_with_each(shares: list[float], which: int, more: float) -> None:
    """Never above the slowest, never below an equal part of it, and never less when one device gives more."""
    share = share_of_all(shares, 0.97)
    assert min(min(shares), 0.97 / 2) - 1e-9 <= share <= min(shares) + 1e-9
    faster = list(shares)
    faster[which % len(shares)] = max(faster[which % len(shares)], more)
    assert share_of_all(faster, 0.97) >= share - 1e-9


def test_served_share_is_all_from_the_least_share_on_and_little_below() -> None:
    """A replica too slow for its longest prompts counts for little, yet for more where less is missing."""
    assert served_share(0.5, 0.0) == served_share(0.0, 0.0) == served_share(0.5, 0.5) == served_share(1.0, 0.9) == 1.0
    assert served_share(0.25, 0.5) == pytest.approx(0.125)
    shares = [number / 20 for number in range(21)]
    served = [served_share(share, 0.8) for share in shares]
    assert served == sorted(served) and served[0] == 0.0 and served[-1] == 1.0
    assert all(one < share / 0.8 for share, one in zip(shares[1:16], served[1:16], strict=True))


# --------------------------------------------------------------------------------------------------------- what is carried


def test_a_block_alone_carries_its_rate_less_its_standing_share() -> None:
    """Capacity by kind of device; lacking is what is missing of the load (SCH-3, PRO-4)."""
    both = need("a", load=1.8, rates={H100: 1.0, A100: 0.5}, standing=0.1)
    layout = Layout(Problem((site(0), site(1, kind=A100)), (both,)))
    assert layout.lack(0) == 1.0
    layout.add(0, (0,))
    assert layout.capacity[0] == pytest.approx(0.9) and layout.lack(0) == pytest.approx(0.5)
    layout.add(0, (1,))
    assert layout.capacity[0] == pytest.approx(0.9 + 0.4)


@pytest.mark.parametrize(("floor", "replicas"), [(0, 1), (2, 2), (3, 2)])
def test_a_model_too_slow_for_its_targets_has_its_minimum_all_the_same(floor: int, replicas: int) -> None:
    """Steps that alone take longer than a token may leave a replica no capacity by the numbers, and two have none more; the
    file's word holds, as far as there are devices."""
    slow = need("a", 0.01, value=1000.0, standing=1.9, floor=floor, replicas_min=max(floor, 1), replicas_max=3, load_s=25.0)
    layout = Layout(Problem((site(0), site(1)), (slow,), prices=Prices(device=1.0, load=0.2)))
    Search(layout).grow()
    assert len(layout.of[0]) == replicas


def test_neighbours_slow_each_other_by_what_they_use() -> None:
    """Each gets what the other leaves, of models on one device (SCH-1)."""
    needs = (need("a", usage=0.2), need("b", usage=0.6))
    layout = Layout(Problem((site(0),), needs))
    layout.add(0, (0,))
    layout.add(1, (0,))
    assert (layout.capacity[0], layout.capacity[1]) == pytest.approx((0.485, 1.0 - 0.03 * 0.4 - 0.2))


def test_one_that_goes_on_for_a_while_slows_and_holds_its_device() -> None:
    """Replicas given up with requests still running keep their time and memory until those are over (SCH-8, SCH-9)."""
    needs = (need("a", gb=30), need("b", usage=1.0, gb=60))
    there = Block(1, (0,), ReplicaId("b-1"), bytes_left=40 * GB)
    layout = Layout(Problem((site(0), site(1)), needs, (there,)))
    assert layout.free_bytes[0] == 40 * GB and layout.paid[0] and not layout.on[0] and not layout.paid[1]
    assert layout.fits(0, (0,)) and layout.fits(1, (0,))  # It can be had back: what it holds is its own.
    beside = layout.add(0, (0,))
    assert layout.capacity[0] == pytest.approx(0.485)
    layout.remove(beside)
    assert not Layout(Problem((site(0),), (*needs, need("c", gb=60)), (there,))).fits(2, (0,))
    number = layout.add(1, (0,))
    assert layout.free_bytes[0] == 20 * GB and layout.score().load_s == 0.0
    layout.remove(number)
    assert layout.free_bytes[0] == 40 * GB


def test_a_block_that_cannot_change_is_charged_what_it_holds() -> None:
    """A replica that loads holds its budget, whatever the least would be (SCH-8)."""
    loading = Block(0, (0,), ReplicaId("a-1"), bytes_held=50 * GB)
    layout = Layout(Problem((site(0),), (need("a", gb=20),), (loading,)), (loading,))
    assert layout.free_bytes[0] == 30 * GB
    layout.remove(1)
    assert layout.free_bytes[0] == 80 * GB


def test_free_memory_is_shared_out_by_what_neighbours_want() -> None:
    """KV beyond the least is lacking like time is (SCH-3, SCH-13)."""
    needs = (need("a", load=0.1, gb=20, kv_bytes=60 * GB), need("b", load=0.1, gb=20, kv_bytes=20 * GB))
    layout = Layout(Problem((site(0),), needs))
    layout.add(0, (0,))
    assert layout.kv_bytes(0) == pytest.approx(60 * GB) and layout.lack(0) == 0.0
    layout.add(1, (0,))
    assert layout.kv_bytes(0) == pytest.approx(30 * GB) and layout.kv_bytes(1) == pytest.approx(10 * GB)
    assert layout.lack(0) == layout.lack(1) == pytest.approx(0.5)


def test_the_kv_that_a_loading_replica_holds_is_its_models() -> None:
    """It has got its part of the free memory; what is left is for its neighbour (SCH-8, SCH-13)."""
    needs = (need("a", load=0.1, gb=20, kv_bytes=40 * GB), need("b", load=0.1, gb=10, kv_bytes=GB / 2))
    loading = Block(0, (0,), ReplicaId("a-1"), bytes_held=60 * GB)
    layout = Layout(Problem((site(0),), needs, (loading,)), (loading,))
    layout.add(1, (0,))
    assert layout.free_bytes[0] == 10 * GB
    assert layout.lack(1) == 0.0 and layout.lack(0) == 0.0


def test_worth_is_lost_value_then_devices_then_loads() -> None:
    """The parts of the objective add up by their prices; what is there costs no load (SCH-3, SCH-4)."""
    there = Block(0, (0,), ReplicaId("a-1"))
    prices = Prices(device=1.0, load=0.2, block=0.02)
    needs = (need("a", load=0.5), need("b", load=2.0, value=1000.0, load_s=3.0))
    layout = Layout(Problem((site(0), site(1), site(2)), needs, (there,), prices), (there,))
    assert layout.score() == pytest.approx(Score(1000.0, 1, 0.0, 1000.0 + 1.0 + 0.02))
    layout.add(1, (2,))
    assert layout.score() == pytest.approx(Score(500.0, 2, 3.0, 500.0 + 2.0 + 0.6 + 0.04))
    layout.remove(1)
    assert layout.left() == [(0, (0,))] and layout.is_there((0, (0,))) and not layout.is_there((1, (2,)))


def test_more_is_kept_than_is_asked_for_before_anything_is_given_up() -> None:
    """Hysteresis: two levels of the same load, switched by ``keep`` (SCH-4)."""
    layout = Layout(Problem((site(0),), (need("a", load=0.5, load_keep=2.0),)))
    layout.add(0, (0,))
    assert layout.lack(0) == 0.0
    layout.keep = True
    assert layout.lack(0) == pytest.approx(0.5)
    layout.keep = False
    assert layout.lack(0) == 0.0


# --------------------------------------------------------------------------------------------------------------- what fits


def test_fits_asks_memory_kind_residents_and_copies() -> None:
    """Each hard bound of a device by itself (SCH-1, SCH-2)."""
    needs = (need("a"), need("b", gb=70), need("c", rates={A100: 1.0}), need("d", gb=5))
    problem = Problem((site(0), site(1, kind=A100)), needs)
    layout = Layout(problem)
    assert [layout.fits(number, (0,)) for number in range(4)] == [True, True, False, True]
    assert layout.fits(2, (1,))
    layout.add(0, (0,))
    assert not layout.fits(0, (0,))  # A second copy only costs.
    assert not layout.fits(1, (0,))  # Its memory is not there any more.
    layout.add(3, (0,))
    assert not layout.fits(0, (0,)) and not layout.fits(3, (0,))  # Two residents are the most.


def test_fits_asks_neighbours_and_tenants() -> None:
    """Nobody lives beside one that may not, on either side, nor beside another tenant's (SCH-3)."""
    needs = (need("a"), need("b", co_locates=False), need("c", tenant="bank"), need("d", tenant="bank"))
    for first, allowed in ((0, []), (1, []), (2, [3]), (3, [2])):
        layout = Layout(Problem((site(0, residents=4),), needs))
        layout.add(first, (0,))
        assert [number for number in range(4) if layout.fits(number, (0,))] == allowed


def test_fits_counts_replicas_and_devices() -> None:
    """At most ``replicas_max``, and as many devices as one replica spans (SCH-3)."""
    needs = (need("a", replicas_max=1), need("b", gpus=2))
    layout = Layout(Problem(tuple(site(number) for number in range(3)), needs))
    assert not layout.fits(1, (0,)) and layout.fits(1, (0, 1))
    layout.add(0, (2,))
    assert not layout.fits(0, (0,))


# ------------------------------------------------------------------------------------------------------- taking things back


@dataclass(frozen=True)
class Seen:
    """All that a layout says of itself."""

    blocks: dict[int, Block]
    capacity: list[float]
    lack: list[float]
    free: list[int]
    on: list[list[int]]
    of: list[list[int]]
    carried: dict[int, float]
    left: list[tuple[int, tuple[int, ...]]]
    score: Score

    @classmethod
    def at(cls, layout: Layout) -> Seen:
        """Now."""
        sites, needs = range(len(layout.problem.sites)), range(len(layout.problem.needs))
        return cls(
            dict(layout.blocks),
            [layout.capacity[number] for number in needs],
            [layout.lack(number) for number in needs],
            [layout.free_bytes[number] for number in sites],
            [list(layout.on[number]) for number in sites],
            [list(layout.of[number]) for number in needs],
            {number: layout.carried[number] for number in layout.blocks},
            layout.left(),
            layout.score(),
        )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small pools with something of everything. Seconds of loads are sums of powers of two, so that sums are exact."""
    sites = tuple(
        site(n, group="g", kind=draw(st.sampled_from((H100, A100))), gb=draw(st.sampled_from((40, 80))), residents=3)
        for n in range(draw(st.integers(1, 4)))
    )
    needs = tuple(
        need(
            f"m{number}",
            load=draw(st.sampled_from((0.0, 0.3, 1.7))),
            gb=draw(st.sampled_from((10, 25))),
            rates=draw(st.sampled_from(({H100: 1.0}, {H100: 1.0, A100: 0.4}))),
            gpus=draw(st.sampled_from((1, 1, 2))),
            standing=draw(st.sampled_from((0.0, 0.13))),
            usage=draw(st.sampled_from((0.0, 0.3, 1.0))),
            share_min=draw(st.sampled_from((0.0, 0.6))),
            kv_bytes=draw(st.sampled_from((0.0, 7e9))),
            replicas_min=draw(st.integers(0, 2)),
            load_s=draw(st.sampled_from((0.5, 3.0))),
        )
        for number in range(draw(st.integers(1, 3)))
    )
    problem = Problem(sites, needs)
    layout = Layout(problem)
    for number in range(draw(st.integers(0, 3))):
        _change(layout, number * 7 + draw(st.integers(0, 6)), False)
    placed = tuple(
        replace(block, replica=ReplicaId(f"r-{number}"), bytes_left=draw(st.sampled_from((0, 3 * GB))))
        for number, block in layout.blocks.items()
    )
    return replace(problem, placed=placed if len({block.place for block in placed}) == len(placed) else ())


def _change(layout: Layout, choice: int, takes: bool) -> None:
    """Removes one, or adds one where it fits, by a number."""
    if takes and layout.blocks:
        numbers = sorted(layout.blocks)
        layout.remove(numbers[choice % len(numbers)])
        return
    wanted = choice % len(layout.problem.needs)
    gpus, count = layout.problem.needs[wanted].gpus, len(layout.problem.sites)
    first = choice % max(1, count - gpus + 1)
    sites = tuple(range(first, first + gpus))
    if sites[-1] < count and layout.fits(wanted, sites):
        layout.add(wanted, sites)


changes = st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=12)


@settings(max_examples=60, deadline=None)
@given(problems(), changes, changes)
def test_rollback_restores_everything_exactly(
    problem: Problem, first: list[tuple[int, bool]], then: list[tuple[int, bool]]
) -> None:
    """Whatever was tried, after taking it back the layout says the same of itself to the last bit."""
    layout = Layout(problem, problem.placed)
    for choice, takes in first:
        _change(layout, choice, takes)
    before, mark = Seen.at(layout), layout.mark()
    for choice, takes in then:
        _change(layout, choice, takes)
    layout.rollback(mark)
    assert Seen.at(layout) == before


@settings(max_examples=60, deadline=None)
@given(problems(), changes)
def test_a_layout_is_worth_the_same_however_it_came_about(problem: Problem, steps: list[tuple[int, bool]]) -> None:
    """Built from its blocks at once it has the same capacity, memory and worth as built step by step."""
    layout = Layout(problem, problem.placed)
    for choice, takes in steps:
        _change(layout, choice, takes)
    anew = Layout(problem, (layout.blocks[number] for number in sorted(layout.blocks)))
    for number in range(len(problem.needs)):
        assert anew.capacity[number] == pytest.approx(layout.capacity[number])
        assert anew.lack(number) == pytest.approx(layout.lack(number))
    assert [anew.free_bytes[n] for n in range(len(problem.sites))] == [
        layout.free_bytes[n] for n in range(len(problem.sites))
    ]
    assert anew.score() == pytest.approx(layout.score())
    assert sorted(anew.left()) == sorted(layout.left())


@settings(max_examples=60, deadline=None)
@given(problems(), changes)
def test_nothing_that_fits_takes_memory_that_is_not_there(problem: Problem, steps: list[tuple[int, bool]]) -> None:
    """Free bytes are what the residents, and those that still hold something, leave; never below nothing (SCH-1)."""
    layout = Layout(problem, problem.placed)
    for choice, takes in steps:
        _change(layout, choice, takes)
        gone = set(layout.left())
        for number, place in enumerate(problem.sites):
            used = sum(problem.needs[layout.blocks[block].need].bytes_min for block in layout.on[number])
            used += sum(b.bytes_left for b in problem.placed if b.place in gone and number in b.sites)
            assert layout.free_bytes[number] == place.memory_bytes - used
            assert layout.free_bytes[number] >= 0


def test_replicas_without_the_share_of_time_that_was_needed_lack_a_little() -> None:
    """Worth a device, but less than any real lack: a small load beside a busy one that turned out to miss its targets."""
    needs = (
        need("small", load=0.1, usage=0.1, share_floor=0.8, value=1000.0),
        need("busy", load=0.5, usage=0.5, value=1000.0),
    )
    beside = Layout(Problem((site(0), site(1)), needs), (Block(0, (0,)), Block(1, (0,))))
    alone = Layout(Problem((site(0), site(1)), needs), (Block(0, (0,)), Block(1, (1,))))
    assert alone.lack(0) == 0.0
    assert beside.lack(0) == pytest.approx(cramped_lack(1000.0) * (1 - beside.share(0, 0) / 0.8))
    assert [value * cramped_lack(value) for value in (3000.0, 1000.0)] == pytest.approx([5.0, 5.0])
    assert beside.lack(1) == 0.0 and beside.score().total > alone.score().total
