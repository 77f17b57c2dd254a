"""Who leaves a tier first (SPEC KVC-1, KVC-3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.core.eviction import EvictionOrder, EvictionSettings

ANY_AGE = EvictionSettings(young_s=0.0)


def chain(name: str, length: int) -> list[bytes]:
    """Units of one chain, from its first one."""
    return [f"{name}{depth}".encode() for depth in range(length)]


def request(order: EvictionOrder, units: Sequence[bytes], now_s: float, *, weight: float = 1.0) -> int:
    """A request whose whole chain is kept; units of 10 bytes."""
    hits = order.used(units, now_s, weight=weight)
    parent = b""
    for unit in units:
        if unit not in order:
            order.add(unit, parent, 10, now_s)
        parent = unit
    return hits


def test_the_longest_unused_chain_goes_first_and_from_its_end() -> None:
    """KVC-1: leaves first; with nothing learned yet the order is that of LRU."""
    order = EvictionOrder(ANY_AGE)
    for name, at in (("a", 0.0), ("b", 20.0), ("c", 40.0)):
        request(order, chain(name, 3), at)
    assert order.victims(50, 60.0) == [b"a2", b"a1", b"a0", b"b2", b"b1"]
    assert (len(order), order.bytes_held) == (4, 40)


def test_a_chain_that_was_used_again_goes_last() -> None:
    """KVC-1: a use counts for the unit and for all before it."""
    order = EvictionOrder(ANY_AGE)
    for name, at in (("a", 0.0), ("b", 20.0)):
        request(order, chain(name, 2), at)
    assert request(order, chain("a", 2), 40.0) == 2
    assert order.victims(40, 60.0) == [b"b1", b"b0", b"a1", b"a0"]


def test_a_shared_prefix_stays_while_one_of_its_branches_does() -> None:
    """KVC-1: what is left of a chain can be used."""
    order = EvictionOrder(ANY_AGE)
    request(order, [b"root", *chain("a", 2)], 0.0)
    request(order, [b"root", *chain("b", 1)], 20.0)
    assert order.victims(30, 40.0) == [b"a1", b"a0", b"b0"]
    assert order.victims(10, 40.0) == [b"root"]


def test_a_parent_that_comes_after_its_child_is_kept_for_it() -> None:
    """KVC-1: pieces of a chain may come in any order, as when they are pulled from elsewhere."""
    order = EvictionOrder(ANY_AGE)
    order.add(b"child", b"parent", 10, 0.0)
    order.add(b"parent", b"", 10, 0.0)
    assert order.victims(20, 100.0) == [b"child", b"parent"]


def test_young_units_go_only_when_nothing_older_is_left() -> None:
    """KVC-1: 30 s, though the older ones are worth more."""
    order = EvictionOrder(EvictionSettings(young_s=30.0))
    request(order, chain("gold", 6), 0.0, weight=100.0)
    request(order, chain("new", 2), 40.0)
    assert order.victims(70, 45.0) == [*reversed(chain("gold", 6)), b"new1"]


def test_the_young_are_not_spared_where_they_are_most_of_the_tier() -> None:
    """KVC-1: a tier that turns over within a minute keeps what is worth most."""
    order = EvictionOrder(EvictionSettings(young_s=30.0))
    request(order, chain("gold", 2), 0.0, weight=100.0)
    request(order, chain("new", 2), 40.0)
    assert order.victims(30, 45.0) == [b"new1", b"new0", b"gold1"]


def test_units_idle_for_ten_minutes_are_named_from_the_end_of_their_chains() -> None:
    """KVC-1: LRU keeps at most ten minutes."""
    order = EvictionOrder(EvictionSettings(idle_s_max=600.0))
    request(order, [b"root", *chain("a", 2)], 0.0)
    request(order, [b"root", *chain("b", 1)], 1.0)
    request(order, chain("c", 1), 300.0)
    assert order.idle(599.0) == []
    assert order.idle(600.0) == [b"a1", b"a0"]
    assert order.idle(650.0, units_max=1) == [b"b0"]
    assert order.idle(650.0) == [b"root"]
    assert order.idle(899.0) == []
    assert order.idle(900.0) == [b"c0"]


def test_without_a_limit_nothing_is_ever_idle() -> None:
    """KVC-1: the ten minutes are a setting."""
    order = EvictionOrder(EvictionSettings(idle_s_max=math.inf))
    request(order, chain("a", 2), 0.0)
    assert order.idle(1e9) == []


def test_what_must_stay_and_its_parents_are_passed_over() -> None:
    """KVC-3: a chain that runs needs it; a second later it is asked about again."""
    order = EvictionOrder(ANY_AGE)
    request(order, chain("a", 3), 0.0)
    request(order, chain("b", 2), 20.0)
    assert order.victims(100, 40.0, keep=lambda unit: unit == b"a1") == [b"a2", b"b1", b"b0"]
    assert order.victims(100, 40.5) == []
    assert order.victims(100, 41.0) == [b"a1", b"a0"]


def test_what_had_to_stay_and_was_used_then_can_go_at_once() -> None:
    """KVC-3: a use ends the second of waiting; each unit goes once."""
    order = EvictionOrder(ANY_AGE)
    request(order, chain("a", 1), 0.0)
    assert order.victims(10, 5.0, keep=lambda unit: True) == []
    request(order, chain("a", 1), 5.1)
    assert order.victims(10, 5.5) == [b"a0"]
    assert order.victims(10, 7.0) == []


def test_test_traffic_goes_before_all_others_until_others_use_it() -> None:
    """KVC-2: test traffic is demoted first, even when it is the youngest."""
    order = EvictionOrder()
    request(order, chain("a", 1), 0.0)
    request(order, chain("t", 2), 100.0, weight=0.0)
    order.add(b"u0", b"", 10, 100.0, test=True)
    assert sorted(order.victims(20, 101.0)) == [b"t1", b"u0"]
    request(order, chain("t", 1), 102.0)
    assert order.victims(10, 103.0) == [b"a0"]


def test_an_access_on_another_node_counts_when_it_is_later() -> None:
    """KVC-2: the maximum of the local and the shared last access."""
    order = EvictionOrder(ANY_AGE)
    for name, at in (("a", 0.0), ("b", 20.0)):
        request(order, chain(name, 1), at)
    order.used_elsewhere(b"a0", 100.0)
    order.used_elsewhere(b"b0", 10.0)
    order.used_elsewhere(b"unknown", 100.0)
    assert order.victims(20, 120.0) == [b"b0", b"a0"]


def test_single_touches_of_a_chain_count_as_one_use() -> None:
    """KVC-1: who does not know whole chains touches unit by unit, parents first."""
    order = EvictionOrder(ANY_AGE)
    for name, at in (("a", 0.0), ("b", 20.0)):
        request(order, chain(name, 2), at)
    assert [order.touch(unit, 40.0) for unit in chain("a", 3)] == [True, True, False]
    assert order.victims(40, 60.0) == [b"b1", b"b0", b"a1", b"a0"]


def test_blocks_of_an_answer_keep_their_request_young() -> None:
    """KVC-1: a request that still writes is not idle."""
    order = EvictionOrder(EvictionSettings(young_s=0.0, idle_s_max=600.0))
    request(order, chain("a", 1), 0.0)
    order.add(b"a1", b"a0", 10, 500.0)
    assert order.idle(700.0) == []
    assert order.idle(1100.0) == [b"a1", b"a0"]


def test_a_unit_that_comes_again_has_its_new_size() -> None:
    """KVC-1: a codec changes it."""
    order = EvictionOrder(ANY_AGE)
    request(order, chain("a", 1), 0.0)
    order.add(b"a0", b"", 3, 1.0)
    assert order.bytes_held == 3
    order.remove(b"a0")
    order.remove(b"a0")
    assert (len(order), order.bytes_held) == (0, 0)


def test_kinds_of_requests_that_come_back_are_kept_before_those_that_do_not() -> None:
    """KVC-1: learned; LRU would evict the conversation, which is older than the scan."""
    order = EvictionOrder(ANY_AGE)
    now_s = 0.0
    for number in range(200):
        now_s += 10.0
        talk = chain(f"t{number}-", 3)
        request(order, talk, now_s)
        request(order, [*talk, *chain(f"u{number}-", 1)], now_s + 5.0)
        request(order, chain(f"scan{number}-", 12), now_s)
        order.victims(max(0, order.bytes_held - 600), now_s + 5.0)
    request(order, chain("talk", 3), now_s + 6.0)
    request(order, chain("long", 12), now_s + 8.0)
    gone = order.victims(order.bytes_held - 60, now_s + 9.0)
    assert gone.index(b"long11") < gone.index(b"talk2") if b"talk2" in gone else b"long11" in gone


class Obvious:
    """What is held, by the slowest means: a dictionary of parents and sizes."""

    def __init__(self) -> None:
        self.held: dict[bytes, tuple[bytes, int]] = {}

    def leaves(self) -> set[bytes]:
        """Units without children."""
        return set(self.held) - {parent for parent, _ in self.held.values()}

    def check(self, order: EvictionOrder) -> None:
        """Both know the same."""
        assert len(order) == len(self.held)
        assert all(unit in order for unit in self.held)
        assert order.bytes_held == sum(size for _, size in self.held.values())

    def gone(self, units: Sequence[bytes]) -> int:
        """Takes them out one by one; each must be a leaf by then. Returns their bytes."""
        total = 0
        for unit in units:
            assert unit in self.leaves()
            total += self.held.pop(unit)[1]
        return total


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "keep", "victims", "idle", "touch", "remove", "elsewhere"]),
        st.integers(0, 40),
        st.integers(1, 6),
        st.floats(0.0, 90.0),
    ),
    max_size=60,
)


def units_of(seed: int, length: int) -> list[bytes]:
    """A path in a tree of three branches per unit: paths share prefixes."""
    path, names = "", []
    for _ in range(length):
        path += "abc"[seed % 3]
        seed //= 3
        names.append(path.encode())
    return names


def play(steps: list[tuple[str, int, int, float]]) -> list[list[bytes]]:
    """Runs the steps against the obvious model; returns who went."""
    order = EvictionOrder(EvictionSettings(young_s=30.0, idle_s_max=300.0, absent_max=8, kept_s=0.0))
    model = Obvious()
    now_s = 0.0
    went: list[list[bytes]] = []
    for what, seed, length, after_s in steps:
        now_s += after_s
        units = units_of(seed, length)
        if what in ("use", "keep"):
            hits = order.used(units, now_s, weight=float(seed % 3))
            assert hits == next((depth for depth, unit in enumerate(units) if unit not in model.held), length)
            kept = units if what == "use" else units[: length // 2]
            for parent, unit in zip([b"", *kept], kept, strict=False):
                order.add(unit, parent, 1 + seed % 4, now_s)
                model.held[unit] = (parent, 1 + seed % 4)
        elif what == "victims":
            must_stay = units[-1]
            gone = order.victims(seed, now_s, lambda unit, stays=must_stay: unit == stays)  # type: ignore[misc]
            went.append(gone)
            assert must_stay not in gone
            assert model.gone(gone) >= seed or model.leaves() <= {must_stay}
            assert len(gone) == len(set(gone))
        elif what == "idle":
            went.append(order.idle(now_s, units_max=length))
            assert len(went[-1]) <= length
            model.gone(went[-1])
        elif what == "touch":
            assert [order.touch(unit, now_s) for unit in units] == [unit in model.held for unit in units]
        elif what == "elsewhere":
            order.used_elsewhere(units[-1], now_s - seed)
        elif units[-1] in model.leaves():
            order.remove(units[-1])
            model.gone([units[-1]])
        model.check(order)
    went.append(order.victims(10**9, now_s))
    model.gone(went[-1])
    assert not model.held
    return went


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_no_unit_goes_before_its_descendants_and_the_same_calls_give_the_same_victims(
    steps: list[tuple[str, int, int, float]],
) -> None:
    """KVC-1, KVC-3: prefix closure, bytes as asked, nothing lost or named twice, determinism."""
    assert play(steps) == play(steps)


def test_what_is_remembered_is_bounded_without_an_end_of_requests() -> None:
    """M5: neither chains that are never kept, nor units that come and go, grow the order."""
    order = EvictionOrder(EvictionSettings(absent_max=50, young_s=0.0))
    for number in range(2000):
        order.used(chain(f"seen{number}-", 3), float(number))
        request(order, chain(f"kept{number}-", 3), float(number))
        order.victims(order.bytes_held - 100, float(number))
    assert len(order) <= 10
    sizes = [len(order._absent), len(order._children), len(order._kept), sum(len(visits) for visits in order._ageing)]
    assert sizes[0] <= 50 and sizes[1] <= 50 and sizes[2] == 0 and sizes[3] <= 100
