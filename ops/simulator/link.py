"""The link over which a node fetches weights that its host memory does not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from ops.simulator.world import World


@dataclass(slots=True, eq=False)
class _Load:
    left_s: float
    done: Callable[[], None]


class NodeLink:
    """Parallel loads share it evenly: with n of them each goes at 1/n of its speed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loads: list[_Load] = []
        self._synced_s = 0.0
        self._version = 0

    def load(self, alone_s: float, done: Callable[[], None]) -> Callable[[], None]:
        """Begins a load that takes ``alone_s`` when it has the link for itself, then calls ``done``.

        Returns what ends it early.
        """
        self._sync()
        load = _Load(alone_s, done)
        self._loads.append(load)
        self._plan()
        return lambda: self._give_up(load)

    def _give_up(self, load: _Load) -> None:
        if load in self._loads:
            self._sync()
            self._loads.remove(load)
            self._plan()

    def _sync(self) -> None:
        now_s = self._world.now_s
        if self._loads:
            each_s = (now_s - self._synced_s) / len(self._loads)
            for load in self._loads:
                load.left_s -= each_s
        self._synced_s = now_s

    def _plan(self) -> None:
        self._version += 1
        left_s = min((load.left_s for load in self._loads), default=inf)
        if left_s < inf:
            version = self._version
            self._world.at(self._world.now_s + max(0.0, left_s) * len(self._loads), lambda: self._due(version))

    def _due(self, version: int) -> None:
        if version != self._version:
            return
        self._sync()
        first = min(self._loads, key=lambda load: load.left_s)
        self._loads.remove(first)
        self._plan()
        first.done()
