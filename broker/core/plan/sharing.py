"""What a replica gets of its devices' time beside others that take turns with it there, and what that is worth to it."""

from __future__ import annotations

from broker.core.plan.tunables import SHARING_KEEPS, STARVED_POWER


def served_share(share: float, share_min: float) -> float:
    """What counts of a replica with this share of time whose model needs at least ``share_min``."""
    return 1.0 if share >= share_min else float((share / share_min) ** STARVED_POWER)


def share_of_time(others: list[float], keeps: float = SHARING_KEEPS) -> float:
    """The share that one replica gets beside ``others`` that take so much each on average (sorts them).

    Who wants little gets all of it, who wants more as much as everybody else who does (``workers.turns``, decision 0008);
    taking turns costs its part of the time only while several work.
    """
    if len(others) == 1:
        usage = others[0]
        left = 1.0 - (1.0 - keeps) * min(1.0, 2.0 * usage)
        return left / 2 if usage > left / 2 else left - usage
    total = sum(others)
    left = 1.0 - (1.0 - keeps) * min(1.0, 2.0 * total)
    others.sort()
    for number, usage in enumerate(others):
        fair = left / (len(others) + 1 - number)
        if usage > fair:
            return fair
        left -= usage
    return left


def share_of_all(shares: list[float], keeps: float = SHARING_KEEPS) -> float:
    """The share that a replica over several devices gets of all of them at once.

    Neighbours are busy at different times on each, and the slowest decides: what is above an equal part on the slowest one
    is there only while no other is busy.
    """
    least = min(shares)
    equal = min(least, keeps / 2)
    free = 1.0
    for share in shares:
        free *= share
    return equal + (least - equal) * free / least
