"""Which device suits which model, learned while serving (SCH-10).

The capacity profile says how long things take on a *kind* of device. Devices of one kind differ: one throttles, one has a
bad link, one shares a power supply. Every five minutes what was seen in that time, per pair of model and device, is an
example: the logarithm of time taken over time predicted, less what the model takes longer everywhere (no device's fault),
against who and where, and arrival rate. A linear model trained by FTRL-Proximal (McMahan et al. 2013; the library is
``river``) gives each pair a factor; routing prefers low ones (``prewarming``), placement does not ask yet.

Bounded: names are hashed into a fixed number of weights, examples wait in a bounded queue and are learned a few per look.
Old examples fade. Deterministic: the same calls give the same factors.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from broker.core.plan import tunables as t
from broker.core.pool.catalogue import DeviceKey
from subjects.errors import ConfigError
from subjects.ids import DeploymentKey

WEIGHTS_MAX = 4 * t.KEPT_MAX


Pair = tuple[DeploymentKey, DeviceKey]
Name = TypeVar("Name", bound=str)


class DeviceScores:
    """Factors of (model, device). Making one imports ``river``, which takes seconds: do it before leading."""

    def __init__(self) -> None:
        try:
            from river import linear_model, optim
        except ImportError:
            raise ConfigError("river is not installed: pip install 'carpool[research]'") from None

        optimizer = optim.FTRLProximal(alpha=t.FTRL_ALPHA, beta=t.FTRL_BETA, l1=0.0, l2=t.FTRL_L2)
        self._model: Any = linear_model.LinearRegression(optimizer=optimizer, intercept_lr=0.0)
        self._seen: dict[Pair, tuple[float, int]] = {}
        """In this period: the sum of logarithms, and how many."""
        self._rates: dict[Pair, float] = {}
        """Arrivals per second when it was last observed."""
        self._period_end_s = math.inf
        self._everywhere: dict[DeploymentKey, float] = {}
        """By model the running mean of its logarithms over all devices."""
        self._examples: deque[tuple[dict[str, float], float, float]] = deque(maxlen=t.KEPT_MAX)
        self.learned = 0
        """Examples so far, each pass counted."""

    def observe(
        self, deployment: DeploymentKey, device: DeviceKey, predicted_s: float, seen_s: float, arrival_rps: float = 0.0
    ) -> None:
        """Something of this model took ``seen_s`` on this device, and ``predicted_s`` by its profile under that load."""
        key = (deployment, device)
        full = key not in self._seen and len(self._seen) >= t.KEPT_MAX
        if full or not predicted_s > 0.0 or not seen_s > 0.0:
            return
        log_sum, count = self._seen.get(key, (0.0, 0))
        ratio = min(t.CORRECTION_MAX, max(1.0 / t.CORRECTION_MAX, seen_s / predicted_s))
        self._seen[key] = (log_sum + math.log(ratio), count + 1)
        if key not in self._rates and len(self._rates) >= t.KEPT_MAX:
            del self._rates[next(iter(self._rates))]
        self._rates[key] = arrival_rps

    def look(self, now_s: float) -> None:
        """Closes a period that is over, and learns some of the examples that wait. Call it at each look."""
        if now_s >= self._period_end_s:
            self._close()
            self._period_end_s = math.inf
        self._period_end_s = min(self._period_end_s, now_s + t.PERIOD_S)
        for _ in range(min(len(self._examples), t.PER_LOOK)):
            self._model.learn_one(*self._examples.popleft())
            self.learned += 1

    def factor(self, deployment: DeploymentKey, device: DeviceKey) -> float:
        """How many times longer than its profile says this model takes there; 1 for what nobody knows."""
        if self.learned == 0:
            return 1.0
        features = _features(deployment, device, self._rates.get((deployment, device), 0.0))
        bound = math.log(t.FACTOR_MAX)
        # The intercept is not learned, so that the sum over who and where is the whole answer.
        return math.exp(min(bound, max(-bound, float(self._model.predict_one(features)))))

    def preference(self, deployment: DeploymentKey, devices: Iterable[DeviceKey]) -> dict[DeviceKey, float]:
        """Factors of these devices over their geometric mean: below 1 is better than the others."""
        factors = {device: self.factor(deployment, device) for device in devices}
        mean = math.exp(math.fsum(map(math.log, factors.values())) / max(1, len(factors)))
        return {device: factor / mean for device, factor in factors.items()}

    def routing_weights(self, deployment: DeploymentKey, replicas: Mapping[Name, DeviceKey]) -> dict[Name, float]:
        """Routing weights for a model's replicas, the inverse of their devices' preference: all then take equally long."""
        preference = self.preference(deployment, replicas.values())
        return {replica: round(1.0 / preference[device], 3) for replica, device in replicas.items()}

    def _close(self) -> None:
        optimizer = self._model.optimizer
        for name in optimizer.n:
            optimizer.z[name] *= t.EXAMPLE_FADE
            optimizer.n[name] *= t.EXAMPLE_FADE**2
        means: dict[DeploymentKey, dict[DeviceKey, float]] = {}
        for (deployment, device), (log_sum, count) in sorted(self._seen.items()):
            if count >= t.SEEN_MIN:
                means.setdefault(deployment, {})[device] = log_sum / count
        examples = []
        for deployment, logs in means.items():
            mean = math.fsum(logs.values()) / len(logs)
            before = self._everywhere.pop(deployment, mean)
            # Of one device alone one cannot say whether it or the model is slow; of several it is what they share.
            everywhere = self._everywhere[deployment] = before + (1.0 if len(logs) > 1 else 0.2) * (mean - before)
            for device, log in logs.items():
                key = (deployment, device)
                weight = min(1.0, self._seen[key][1] / (4.0 * t.SEEN_MIN))
                examples.append((_features(*key, self._rates.get(key, 0.0)), log - everywhere, weight))
        while len(self._everywhere) > t.KEPT_MAX:
            del self._everywhere[next(iter(self._everywhere))]
        for _ in range(t.PASSES):
            self._examples.extend(examples)
        self._seen.clear()


def _features(deployment: DeploymentKey, device: DeviceKey, arrival_rps: float) -> dict[str, float]:
    """Who, where, both, and the load; each name is one of ``WEIGHTS_MAX`` buckets."""
    where = f"{device[0]}/{device[1]}"
    return {
        _bucket(f"device {where}"): 1.0,
        _bucket(f"{deployment} on {where}"): 1.0,
        "arrivals": math.log1p(max(0.0, arrival_rps)) / 4.0,
    }


def _bucket(name: str) -> str:
    return f"b{zlib.crc32(name.encode()) % WEIGHTS_MAX}"
