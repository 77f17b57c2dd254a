"""The greedy plan: golden cases of the knapsack, and what no plan may ever do (SCH-3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.core.plan.layout import Layout
from broker.core.plan.problem import Block, Need, Problem
from broker.core.plan.search import Plan, Search, named, plan
from subjects.ids import ReplicaId
from tests.core import test_layout as layouts
from tests.core.test_layout import A100, H100, site

GOLD, SILVER, BRONZE = 3000.0, 1000.0, 300.0


def need(name: str, load: float = 0.5, gb: float = 20, **changes: object) -> Need:
    """What a model wants; all of it is worth a Silver one's."""
    return layouts.need(name, load, gb, **({"value": SILVER} | changes))


def there(number: int, sites: Iterable[int], name: str = "", *, stays: bool = False) -> Block:
    """A replica that exists."""
    places = tuple(sites)
    return Block(number, places, ReplicaId(name or f"m{number}-on-{'-'.join(map(str, places))}"), stays)


def counts(found: Plan) -> Counter[int]:
    """Replicas by model."""
    return Counter(block.need for block in found.blocks)


def loads(found: Plan) -> list[Block]:
    """Blocks that are new."""
    return [block for block in found.blocks if block.replica is None]


# ----------------------------------------------------------------------------------------------------------- golden cases


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_two_servers_with_room_for_one_large_or_two_small(order: tuple[int, int, int]) -> None:
    """The two 7B share one server, so that the 70B has the other, in whatever order they are named (SCH-3)."""
    named_needs = (need("s1", load=0.3, gb=70, usage=0.3), need("s2", load=0.3, gb=70, usage=0.3), need("large", gb=140))
    servers = tuple(site(number, gb=140) for number in range(2))
    found = plan(Problem(servers, tuple(named_needs[number] for number in order)))
    on = [sorted(order[block.need] for block in found.blocks if number in block.sites) for number in range(2)]
    assert sorted(on) == [[0, 1], [2]]
    assert found.score.lost == 0.0


@pytest.mark.parametrize("whole", [False, True])
def test_a_busy_model_moves_over_for_one_that_lacks_a_second_device(whole: bool) -> None:
    """Each device has room for two: of two that share one, one moves beside the busy model, which gets its place. Nobody
    loses a replica, and nothing moves that may not."""
    needs = (need("busy", load=1.1, gb=70, usage=0.6), *(need(name, load=0.1, gb=70, usage=0.1) for name in ("a", "b")))
    servers = tuple(site(number, gb=140) for number in range(2))
    placed = (there(0, (0,)), there(1, (1,)), there(2, (1,)))

    def found(placed: tuple[Block, ...]) -> tuple[Block, ...]:
        if whole:
            return plan(Problem(servers, needs, placed)).blocks
        layout = Layout(Problem(servers, needs, placed), placed)
        Search(layout).grow()
        return named(layout)

    blocks = found(placed)
    assert Counter(block.need for block in blocks) == {0: 2, 1: 1, 2: 1}
    assert {block.sites for block in blocks if block.need == 0} == {(0,), (1,)}
    assert len([block for block in blocks if block.replica is None]) == 2
    pinned = tuple(replace(block, stays=True) for block in placed)
    assert set(found(pinned)) == set(pinned)


def test_a_large_one_moves_in_where_two_small_ones_sit_apart() -> None:
    """From two 7B on a server each: one moves to the other, and the 70B has a whole server (SCH-3)."""
    needs = (need("s1", load=0.3, gb=70, usage=0.3), need("s2", load=0.3, gb=70, usage=0.3), need("large", gb=140))
    found = plan(Problem(tuple(site(number, gb=140) for number in range(2)), needs, (there(0, (0,)), there(1, (1,)))))
    assert found.score.lost == 0.0 and counts(found) == {0: 1, 1: 1, 2: 1}
    assert len(loads(found)) == 2


def test_one_large_replica_yields_its_card_to_the_small_model() -> None:
    """Four cards; the 7B goes 10 -> 18 QPS at 5 per replica, the 70B 4 -> 1 at 2 per replica: one card changes hands, and
    nothing else moves (SCH-3)."""
    cards = tuple(site(number, residents=1) for number in range(4))
    placed = (there(0, (0,)), there(0, (1,)), there(1, (2,)), there(1, (3,)))
    before = (need("m7b", load=10 / 5), need("m70b", load=4 / 2, gb=70))
    assert set(plan(Problem(cards, before, placed)).blocks) == set(placed)
    after = (need("m7b", load=18 / 5), need("m70b", load=1 / 2, gb=70))
    found = plan(Problem(cards, after, placed))
    assert counts(found) == {0: 3, 1: 1}
    assert [block.need for block in loads(found)] == [0]
    assert set(placed[:2]) <= set(found.blocks)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_gold_before_silver_before_bronze(order: tuple[int, int, int]) -> None:
    """Cards go by class while there are too few, in whatever order the models are named (SCH-3)."""
    values = (GOLD, SILVER, BRONZE)
    needs = tuple(need(f"class{number}", load=0.9, value=values[number]) for number in order)
    for cards in (1, 2, 3):
        found = plan(Problem(tuple(site(number, residents=1) for number in range(cards)), needs))
        assert sorted(order[block.need] for block in found.blocks) == list(range(cards))


def test_gold_takes_bronze_ones_card() -> None:
    """A Bronze model's second replica yields to Gold; its last one does not go for a little of Gold's load (SCH-3)."""
    cards = tuple(site(number, residents=1) for number in range(3))
    needs = (need("gold", load=2.0, value=GOLD), need("bronze", load=2.0, value=BRONZE))
    placed = (there(0, (0,)), there(1, (1,)), there(1, (2,)))
    found = plan(Problem(cards, needs, placed))
    assert counts(found) == {0: 2, 1: 1} and len(loads(found)) == 1


def test_smallest_and_largest_numbers_of_replicas_hold() -> None:
    """A VIP keeps two though nobody asks; nobody gets more than its most, whatever it lacks (SCH-3)."""
    cards = tuple(site(number, residents=1) for number in range(6))
    needs = (need("vip", load=0.0, replicas_min=2), need("crowded", load=5.0, replicas_max=3))
    assert counts(plan(Problem(cards, needs))) == {0: 2, 1: 3}
    placed = (there(0, (0,)), there(0, (1,)), there(0, (2,)))
    found = plan(Problem(cards, needs, placed))
    assert counts(found) == {0: 2, 1: 3} and {block for block in found.blocks if block.need == 0} < set(placed)


def test_blocks_that_stay_are_kept_though_others_lack() -> None:
    """Operators' locks win over everybody's wants (SCH-3, SCH-11)."""
    cards = tuple(site(number, residents=1) for number in range(2))
    needs = (need("idle", load=0.0), need("gold", load=2.0, value=GOLD))
    free = (there(0, (0,)), there(0, (1,)))
    assert counts(plan(Problem(cards, needs, free))) == {1: 2}
    locked = (there(0, (0,), stays=True), there(0, (1,)))
    found = plan(Problem(cards, needs, locked))
    assert counts(found) == {0: 1, 1: 1} and locked[0] in found.blocks


def test_replicas_over_several_devices_stay_within_one_group() -> None:
    """Tensor parallel needs linked devices of one group; single ones are left where no group is large enough (SCH-1)."""
    needs = (need("tp2", load=0.9, gpus=2),)
    split = (site(0, group="a"), site(1, group="b"), site(2, group="b"), site(3))
    assert [block.sites for block in plan(Problem(split, needs)).blocks] == [(1, 2)]
    assert plan(Problem((site(0, group="a"), site(1, group="b"), site(2), site(3)), needs)).blocks == ()
    four = tuple(site(number, group="ab"[number // 2]) for number in range(4))
    found = plan(Problem(four, (need("tp2", load=1.8, gpus=2),)))
    assert sorted(block.sites for block in found.blocks) == [(0, 1), (2, 3)]


def test_small_models_leave_a_group_free_for_one_that_spans_it() -> None:
    """Of a Gold tensor-parallel model and two small ones, the small ones go where nothing is linked (SCH-3)."""
    sites = (site(0, group="a", residents=1), site(1, group="a", residents=1), site(2, residents=1), site(3, residents=1))
    needs = (need("s1", load=0.5), need("s2", load=0.5), need("tp2", load=0.9, gpus=2, value=GOLD))
    found = plan(Problem(sites, needs))
    assert found.score.lost == 0.0
    assert {block.sites for block in found.blocks if block.need == 2} == {(0, 1)}


def test_gold_over_two_devices_takes_them_from_bronze_on_one_each() -> None:
    """A tensor-parallel model is not locked out by small ones that have more than one replica each (SCH-3)."""
    sites = tuple(site(number, group="a", residents=1) for number in range(4))
    needs = (
        need("s1", load=1.8, value=BRONZE),
        need("s2", load=1.8, value=BRONZE),
        need("tp2", load=0.9, gpus=2, value=GOLD),
    )
    placed = (there(0, (0,)), there(0, (1,)), there(1, (2,)), there(1, (3,)))
    layout = Layout(Problem(sites, needs, placed), placed)
    Search(layout).grow()
    assert layout.lack(2) == 0.0


def test_kinds_of_devices_count_by_what_they_bring() -> None:
    """Units of capacity are per kind of device; a model never goes where its costs are not known (SCH-1, SCH-3)."""
    sites = (site(0, kind=A100), site(1, kind=A100), site(2), site(3, kind="tiny"))
    found = plan(Problem(sites, (need("a", load=0.9, rates={H100: 1.0, A100: 0.5}),)))
    assert [block.sites for block in found.blocks] == [(2,)]  # One large beats two small ones.
    both = (need("a", load=0.9), need("b", load=0.45, rates={H100: 1.0, A100: 0.5}))
    found = plan(Problem(tuple(replace(place, residents_max=1) for place in sites), both))
    assert found.score.lost == 0.0
    assert {block.need: sites[block.sites[0]].kind for block in found.blocks} == {0: H100, 1: A100}


def test_no_device_is_shared_by_tenants_or_with_one_that_lives_alone() -> None:
    """Tenant-exclusive devices and co-location permission, even when there are too few devices (SCH-3)."""
    small = {"load": 0.1, "usage": 0.1, "gb": 5}
    needs = (
        need("bank-a", tenant="bank", **small),
        need("bank-b", tenant="bank", **small),
        need("shop", tenant="shop", **small),
        need("alone", co_locates=False, **small),
        need("open", **small),
    )
    found = plan(Problem(tuple(site(number, residents=4) for number in range(4)), needs))
    on = sorted(sorted(block.need for block in found.blocks if number in block.sites) for number in range(4))
    assert on == [[0, 1], [2], [3], [4]]
    assert len(plan(Problem(tuple(site(number, residents=4) for number in range(2)), needs)).blocks) in (2, 3)


def test_models_that_complement_each_other_share_a_device() -> None:
    """Of four with room for two on each of two devices, those that use much go beside those that use little (SCH-3)."""
    needs = (
        need("busy-a", load=0.7, usage=0.75, gb=30),
        need("busy-b", load=0.7, usage=0.75, gb=30),
        need("quiet-a", load=0.15, usage=0.15, gb=30),
        need("quiet-b", load=0.15, usage=0.15, gb=30),
    )
    found = plan(Problem((site(0), site(1)), needs))
    on = sorted(sorted(block.need for block in found.blocks if number in block.sites) for number in range(2))
    assert on in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    assert found.score.lost == 0.0


def test_a_device_in_use_is_taken_before_a_new_one() -> None:
    """GPU-hours come right after the SLO: what fits beside others goes there (SCH-3)."""
    needs = (need("a", load=0.2, usage=0.2), need("b", load=0.2, usage=0.2))
    found = plan(Problem((site(0), site(1), site(2)), needs, (there(0, (1,)),)))
    assert {block.sites for block in found.blocks} == {(1,)}
    assert found.score.devices == 1 and len(loads(found)) == 1


def test_devices_are_given_up_when_the_rest_carries_all() -> None:
    """Three devices whose load one carries: two go, nothing is loaded (SCH-3)."""
    needs = (need("a", load=0.5),)
    placed = tuple(there(0, (number,)) for number in range(3))
    found = plan(Problem(tuple(site(number) for number in range(3)), needs, placed))
    assert len(found.blocks) == 1 and not loads(found)


# ------------------------------------------------------------------------------------------------------- what always holds


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small pools with something of everything; what is there was put where it fits."""
    sites = tuple(
        site(
            number,
            group=draw(st.sampled_from(("", "g", "g"))),
            kind=draw(st.sampled_from((H100, H100, A100))),
            gb=draw(st.sampled_from((40, 80))),
            residents=draw(st.integers(1, 3)),
        )
        for number in range(draw(st.integers(1, 5)))
    )
    needs = []
    for number in range(draw(st.integers(1, 4))):
        least = draw(st.integers(0, 2))
        needs.append(
            need(
                f"m{number}",
                load=draw(st.sampled_from((0.0, 0.2, 0.8, 2.5))),
                gb=draw(st.sampled_from((10, 25, 60))),
                rates=draw(st.sampled_from(({H100: 1.0}, {H100: 1.0, A100: 0.4}))),
                gpus=draw(st.sampled_from((1, 1, 1, 2))),
                standing=draw(st.sampled_from((0.0, 0.1))),
                usage=draw(st.sampled_from((0.1, 0.6))),
                share_min=draw(st.sampled_from((0.0, 0.6))),
                kv_bytes=draw(st.sampled_from((0.0, 2e10))),
                value=draw(st.sampled_from((GOLD, SILVER, BRONZE))),
                replicas_min=least,
                replicas_max=least + draw(st.integers(1, 3)),
                co_locates=draw(st.sampled_from((True, True, False))),
                tenant=draw(st.sampled_from(("", "", "bank"))),
            )
        )
    problem = Problem(sites, tuple(needs))
    layout = Layout(problem)
    for _ in range(draw(st.integers(0, 5))):
        number = draw(st.integers(0, len(needs) - 1))
        first = draw(st.integers(0, len(sites) - 1))
        places = tuple(range(first, first + needs[number].gpus))
        linked = len(places) == 1 or all(index < len(sites) and sites[index].group == "g" for index in places)
        if linked and layout.fits(number, places):
            layout.add(number, places)
    placed = tuple(
        there(block.need, block.sites, f"r-{number}", stays=draw(st.sampled_from((False, False, True))))
        for number, block in sorted(layout.blocks.items())
    )
    return replace(problem, placed=placed)


def broken(problem: Problem, blocks: tuple[Block, ...]) -> list[str]:
    """The constraints that a plan breaks, checked without the code that keeps them."""
    found = []
    for number, wanted in enumerate(problem.needs):
        if sum(block.need == number for block in blocks) > wanted.replicas_max:
            found.append(f"{number} has more than its most")
    for block in blocks:
        wanted = problem.needs[block.need]
        places = [problem.sites[index] for index in block.sites]
        if len(set(block.sites)) != wanted.gpus or any(place.kind not in wanted.rates for place in places):
            found.append(f"{block} is on the wrong devices")
        if wanted.gpus > 1 and (len({place.group for place in places}) > 1 or not places[0].group):
            found.append(f"{block} spans what is not linked")
    for index, place in enumerate(problem.sites):
        on = [problem.needs[block.need] for block in blocks if index in block.sites]
        if sum(wanted.bytes_min for wanted in on) > place.memory_bytes:
            found.append(f"more than the memory of {index}")
        if len(on) > place.residents_max or len({wanted.model for wanted in on}) < len(on):
            found.append(f"too many on {index}")
        if len(on) > 1 and (len({w.tenant for w in on}) > 1 or not all(w.co_locates for w in on)):
            found.append(f"neighbours on {index} that may not be")
    names = Counter(block.replica for block in blocks if block.replica is not None)
    if any(count > 1 for count in names.values()) or not set(names) <= {block.replica for block in problem.placed}:
        found.append("replicas named twice, or that are not there")
    if not {block for block in problem.placed if block.stays} <= set(blocks):
        found.append("one that stays is gone")
    return found


@settings(max_examples=60, deadline=None)
@given(problems())
def test_no_plan_breaks_a_constraint_and_none_is_worse_than_what_is_there(problem: Problem) -> None:
    """Every constraint of SCH-3 holds in every plan, and planning never costs more than doing nothing."""
    found = plan(problem, trials_max=1500)
    assert broken(problem, problem.placed) == []
    assert broken(problem, found.blocks) == []
    assert found.score == Layout(problem, found.blocks).score()
    assert found.score.total <= Layout(problem, problem.placed).score().total + 1e-6


@settings(max_examples=25, deadline=None)
@given(problems())
def test_the_same_problem_has_the_same_plan(problem: Problem) -> None:
    """No chance, no clock, no order of hashes."""
    first = plan(problem, trials_max=1000)
    assert plan(replace(problem), trials_max=1000) == first


@settings(max_examples=40, deadline=None)
@given(problems())
def test_growing_takes_nothing_from_who_has_no_more_than_its_least(problem: Problem) -> None:
    """Whoever lacks, its neighbours keep their least numbers and one replica while they have any load (SCH-3)."""
    layout = Layout(problem, problem.placed)
    Search(layout, 1500).grow()
    had = Counter(block.need for block in problem.placed)
    for number, wanted in enumerate(problem.needs):
        least = max(wanted.replicas_min, 1 if wanted.load else 0)
        assert len(layout.of[number]) >= min(had[number], least)


def test_nothing_moves_where_nothing_lacks() -> None:
    """A layout that carries everything and could not do with fewer devices is left as it is (SCH-4)."""
    needs = (need("a", load=1.7, usage=0.9), need("b", load=0.8, usage=0.8), need("c", load=0.1, usage=0.1, gb=10))
    placed = (there(0, (0,)), there(0, (3,)), there(1, (1,)), there(2, (1,)))
    problem = Problem(tuple(site(number) for number in range(5)), needs, placed)
    assert Layout(problem, placed).score().lost == 0.0
    found = plan(problem)
    assert set(found.blocks) == set(placed) and found.score.load_s == 0.0


def test_a_long_load_is_not_made_for_a_little() -> None:
    """Switch cost is in the objective: a second replica for a little of a load comes only if that is cheap (SCH-4)."""
    placed = (there(0, (0,)),)
    for load_s, value, expected in ((3.0, SILVER, 2), (600.0, BRONZE / 2, 1)):
        needs = (need("a", load=1.01 / 0.99, load_s=load_s, value=value),)
        assert len(plan(Problem((site(0), site(1)), needs, placed)).blocks) == expected


def test_trials_are_bounded() -> None:
    """However large and crowded the pool, a look tries about as many changes as it was told, and still gives everybody a
    feasible layout (SCH-4)."""
    sites = tuple(site(number, group=f"g{number // 4}", residents=4) for number in range(24))
    needs = tuple(
        need(f"m{number:02d}", load=0.3 + 0.2 * (number % 5), usage=0.3, gb=12, gpus=2 if number % 6 == 5 else 1)
        for number in range(18)
    )
    problem = Problem(sites, needs)
    one_step = len(sites) * 4 * 3
    found = {trials_max: plan(problem, trials_max=trials_max) for trials_max in (0, 300, 3000)}
    for trials_max, one in found.items():
        assert one.trials <= trials_max + 2 * one_step
        assert broken(problem, one.blocks) == []
    assert found[0].trials < found[300].trials < found[3000].trials
    assert found[3000].score.total < found[300].score.total < found[0].score.total


# ------------------------------------------------------------------------------------------------------------------- steps


def test_emptying_a_device_is_taken_back_unless_that_is_better() -> None:
    """What cannot go elsewhere stays, to the last block (SCH-4)."""
    needs = (need("a", load=0.9, usage=0.9), need("b", load=0.9, usage=0.9))
    placed = (there(0, (0,)), there(1, (1,)))
    layout = Layout(Problem((site(0), site(1)), needs, placed), placed)
    search = Search(layout)
    assert search.shrink() == [] and named(layout) == placed
    assert not search.empty(0) and named(layout) == placed


def test_without_moves_a_device_is_given_up_only_if_the_rest_carries_it_as_it_is() -> None:
    """Giving up and moving are two steps: the second costs a load (SCH-4)."""
    needs = (need("a", load=0.3, usage=0.3), need("b", load=0.3, usage=0.3))
    placed = (there(0, (0,)), there(1, (1,)))
    layout = Layout(Problem((site(0), site(1)), needs, placed), placed)
    assert not Search(layout).empty(0, moves=False)
    assert Search(layout).empty(0) and layout.devices == 1


def test_trimming_takes_what_nobody_misses_but_not_where_it_is_told_not_to() -> None:
    """A replica too many goes, unless its device is spared, or it stays (SCH-4, SCH-11)."""
    needs = (need("a", load=0.5),)
    placed = (there(0, (0,)), there(0, (1,)), there(0, (2,), stays=True))
    layout = Layout(Problem(tuple(site(number) for number in range(3)), needs, placed), placed)
    Search(layout).trim(spared=(0,))
    assert set(named(layout)) == {placed[0], placed[2]}


def crowded() -> tuple[Problem, Layout]:
    """A replica over two devices, slowed on both by a model that has enough elsewhere: one that leaves brings nothing."""
    needs = (
        need("spans", load=0.7, gpus=2, usage=0.7, value=SILVER),
        need("small", load=0.5, usage=0.5, value=SILVER),
    )
    sites = tuple(site(number, group="g", residents=2) for number in range(4))
    placed = (there(0, (0, 1)), there(1, (0,)), there(1, (1,)), there(1, (2,)))
    problem = Problem(sites, needs, placed)
    return problem, Layout(problem, placed)


def test_all_neighbours_of_a_replica_go_at_once_where_one_alone_does_not_help() -> None:
    """Time on one of its devices is worth nothing to a replica that waits for the other (SCH-4)."""
    problem, layout = crowded()
    search = Search(layout)
    before = layout.lack(0)
    search.grow(new_devices=False)
    assert layout.lack(0) == before > 0.1
    assert search.relieve(0)
    assert layout.lack(0) == 0 and layout.lack(1) == 0
    assert named(layout) == (problem.placed[0], problem.placed[3])


def test_relief_spares_what_is_young_and_what_stays_and_is_taken_back_unless_better() -> None:
    """Neighbours with nowhere to go remain (SCH-4, SCH-11)."""
    problem, layout = crowded()
    assert not Search(layout).relieve(0, spared=(1,)) and set(named(layout)) == set(problem.placed)
    stays = tuple(replace(block, stays=block.sites == (1,)) for block in problem.placed)
    layout = Layout(replace(problem, placed=stays), stays)
    assert not Search(layout).relieve(0) and set(named(layout)) == set(stays)
    gold = (problem.needs[0], replace(problem.needs[1], value=GOLD, load=2.0))
    layout = Layout(replace(problem, sites=problem.sites[:3], needs=gold), problem.placed)
    assert not Search(layout).relieve(0) and set(named(layout)) == set(problem.placed)


def test_relief_costs_nobody_its_last_replica_whatever_it_is_worth() -> None:
    """Who never has fewer has no fewer, else it would come and go for ever (SCH-4)."""
    needs = (
        need("gold", load=0.75, usage=0.75, value=GOLD),
        need("batch", load=0.6, usage=0.6, value=50.0, replicas_min=1),
    )
    placed = (there(0, (0,)), there(1, (0,)))
    layout = Layout(Problem((site(0, residents=2),), needs, placed), placed)
    assert layout.lack(0) > 0.3 and not Search(layout).relieve(0) and named(layout) == placed


@pytest.mark.parametrize("groups", [1, 6])
def test_empty_devices_are_among_the_choices_however_many_groups_there_are(groups: int) -> None:
    """A replica over four devices goes where nobody is, not beside busy ones, in a small pool and in a large one (SCH-3)."""
    sites = tuple(site(number, group=f"g{number // 8}", residents=2) for number in range(8 * groups))
    needs = (need("busy", load=0.7 * 4 * groups, usage=0.7, gb=10), need("spans", load=0.9, gpus=4, usage=0.9, gb=10))
    placed = tuple(there(0, (number,)) for number in range(8 * groups) if number % 8 < 4)
    layout = Layout(Problem(sites, needs, placed), placed)
    Search(layout).grow()
    assert layout.lack(1) == 0.0
    assert [block.sites[0] % 8 for block in named(layout) if block.need == 1] == [4]


def test_a_device_that_is_empty_but_full_is_no_place_to_take_over() -> None:
    """Memory that a leaver still holds is nobody's to give (SCH-4)."""
    sites = tuple(site(number, group="a", residents=1) for number in range(3))
    needs = (need("bronze", load=1.8, value=BRONZE), need("gone"), need("tp2", load=0.9, gpus=2, value=GOLD))
    left = Block(1, (0,), ReplicaId("gone"), bytes_left=75_000_000_000)
    placed = (left, there(0, (1,)), there(0, (2,)))
    layout = Layout(Problem(sites, (replace(needs[0], load=0.5), *needs[1:]), placed), placed[1:])
    search = Search(layout)
    assert not search._takeovers(2, ())  # Bronze keeps one of its two: only one device could be had.
    more = Problem((*sites, site(3, group="a", residents=1)), needs, (*placed, there(0, (3,))))
    layout = Layout(more, more.placed[1:])
    Search(layout).grow()
    assert layout.lack(2) == 0.0
