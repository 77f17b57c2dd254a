"""What a replica pulls in situations that need a certain history."""

from __future__ import annotations

from subjects.messages import Lane, SlaClass
from workers.core.pulling import AGEING_S, BACKLOG_TOKENS_MAX, PULL_SLACK, PullPlanner, room_for
from workers.core.replica_events import Pull

SMALL, LARGE = (SlaClass.SILVER, Lane.SMALL), (SlaClass.SILVER, Lane.LARGE)


def planner(*waiting: tuple[SlaClass, Lane], kv_pages: int = 1000) -> PullPlanner:
    """A planner that knows what waits."""
    made = PullPlanner()
    made.open(kv_pages=kv_pages, block_size=16, max_context_len=16 * 800)
    made.set_pool({}, waiting)
    return made


def keys(pulls: list[Pull]) -> list[tuple[SlaClass, Lane]]:
    """Which queues."""
    return [(pull.sla_class, pull.lane) for pull in pulls]


def give_back(made: PullPlanner, now_s: float, pulls: list[Pull]) -> None:
    """All of them expire unused."""
    for pull in pulls:
        made.expired(now_s, pull.sla_class, pull.lane, pull.credits)


def test_a_lane_that_aged_is_pulled_first_when_there_is_room() -> None:
    """Before those that were used a moment ago and those whose turn it is."""
    made = planner(SMALL, LARGE)
    pulls = made.plan(0.0, free_slots=4, free_pages=700)
    assert SMALL in keys(pulls) and LARGE not in keys(pulls)
    give_back(made, 1.0, pulls)
    assert made.plan(1.0 + AGEING_S, free_slots=4, free_pages=700) == []
    assert keys(made.plan(1.1 + AGEING_S, free_slots=4, free_pages=1000))[0] == LARGE


def test_a_lane_whose_pull_is_open_ages_only_while_it_does_not_fit() -> None:
    """Its pull went out when there was room; others took the room; it ages from then on."""
    made = planner(SMALL, LARGE)
    pulls = made.plan(0.0, free_slots=4, free_pages=1000)
    assert LARGE in keys(pulls)
    made.plan(0.5, free_slots=3, free_pages=700)
    give_back(made, 1.0, pulls)
    assert made.plan(0.4 + AGEING_S, free_slots=4, free_pages=700) != []
    made.set_pool({}, (SMALL, LARGE))
    assert made.plan(0.6 + AGEING_S, free_slots=4, free_pages=700) == []


def test_a_lane_that_is_known_to_wait_ages_at_once_however_often_it_was_empty() -> None:
    """Slower ageing is for guesses: a large request after a quiet minute waited a minute beside small ones (seed 269)."""
    made = planner()
    for second in range(8):
        pulls = made.plan(float(second), free_slots=4, free_pages=1000)
        give_back(made, second + 0.9, pulls)
    made.set_pool({}, (SMALL, LARGE))
    give_back(made, 11.0, made.plan(10.0, free_slots=4, free_pages=700))
    assert made.plan(10.0 + AGEING_S, free_slots=4, free_pages=700) == []


def test_the_same_room_gives_no_new_pulls() -> None:
    """Until something else changed."""
    made = planner(SMALL)
    assert made.plan(0.0, free_slots=1, free_pages=1000)
    assert made.plan(0.1, free_slots=1, free_pages=1000) == []
    assert made.outstanding <= 1 + PULL_SLACK


def test_a_busy_queue_pulls_no_more_than_its_window() -> None:
    """Each ticket found opens one credit more, however many slots are free; a pull that expires ends it."""
    for tickets in (1, 2, 3):
        made = planner(SMALL)
        others = [pull for pull in made.plan(0.0, free_slots=8, free_pages=1000) if (pull.sla_class, pull.lane) != SMALL]
        for _ in range(tickets):
            made.found(0.1, *SMALL)
        (pull,) = [p for p in made.plan(0.1, free_slots=8, free_pages=1000) if (p.sla_class, p.lane) == SMALL]
        assert pull.credits == tickets
        give_back(made, 1.1, [*others, pull])
        assert {p.credits for p in made.plan(1.1, free_slots=8, free_pages=1000)} == {1}


def test_credits_of_a_busy_queue_share_the_pages() -> None:
    """What is open may all arrive, so each credit is charged the ceiling of its lane."""
    made = planner(SMALL)
    made.plan(0.0, free_slots=8, free_pages=1000)
    for _ in range(4):
        made.found(0.1, *SMALL)
    (pull,) = [p for p in made.plan(0.2, free_slots=8, free_pages=64 * 3 + 63) if (p.sla_class, p.lane) == SMALL]
    assert pull.credits == 3
    made.found(0.3, *SMALL)
    assert [p.credits for p in made.plan(0.3, free_slots=8, free_pages=64 * 3) if (p.sla_class, p.lane) == SMALL] == [1]


def test_pulls_are_short_only_where_queues_must_take_turns() -> None:
    """Four lanes that fit share six credits and need no turns; twelve do."""
    for free_pages, short in ((64, 0), (1000, 2)):
        pulls = planner(kv_pages=1000).plan(0.0, free_slots=8, free_pages=free_pages)
        assert [pull.expires_s for pull in pulls].count(0.25) == (6 if short else 0)
        assert len(pulls) == (6 if short else 4)


def test_credits_of_empty_queues_stay_within_their_slack() -> None:
    """However often the room changes while they are open."""
    made = planner(kv_pages=1000)
    for free_slots in (2, 3, 4, 5, 3, 8):
        made.plan(0.0, free_slots=free_slots, free_pages=1000)
        assert made.outstanding <= PULL_SLACK
    made = planner(kv_pages=1000)
    assert len(made.plan(0.0, free_slots=1, free_pages=1000)) == 3
    assert len(made.plan(0.0, free_slots=2, free_pages=1000)) == 1
    assert len(made.plan(0.0, free_slots=8, free_pages=1000)) == 2


def test_there_is_room_for_one_more_with_a_slot_its_pages_and_a_short_backlog() -> None:
    """All three; a request of any length fits behind a backlog below the bound."""
    assert room_for(1, 10, 10, BACKLOG_TOKENS_MAX - 1)
    assert not room_for(0, 10, 10, 0)
    assert not room_for(1, 9, 10, 0)
    assert not room_for(1, 10, 10, BACKLOG_TOKENS_MAX)


def test_nothing_is_pulled_while_too_much_is_not_computed_yet() -> None:
    """And as soon as it is, the same room gives pulls."""
    made = planner(SMALL)
    assert made.plan(0.0, free_slots=4, free_pages=1000, backlog_tokens=BACKLOG_TOKENS_MAX) == []
    assert SMALL in keys(made.plan(0.1, free_slots=4, free_pages=1000, backlog_tokens=BACKLOG_TOKENS_MAX - 1))
