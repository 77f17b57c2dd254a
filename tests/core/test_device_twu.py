"""TWU of devices, live: from a gateway's requests to the row of a device (SCH-6, OPS-7)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from broker.core.pool.events import HeaviestGiveWay
from broker.scheduler.twu import FILE, LOOK_EVERY_S, OVER_S, DeviceTwu
from profiles.twu import HEAVIEST_FACTOR, TWU_FULL, allowed_s
from subjects.ids import IngressId
from subjects.messages import IngressTelemetry, Lane, ModelDemand, ModelRecord, Sla, SlaClass
from tests.core.test_live_request import live
from tests.core.test_placement import A, B, Bench, listed, settled
from tests.core.test_requests import delta


def test_a_requests_tokens_count_once_times_their_lateness() -> None:
    """The prompt with the first output, the elapsed part of one that still runs, and nothing twice."""
    request = live(input_tokens=100)
    request.sla = Sla(ttft_p95_ms=2000, tpot_ms=100)
    assert request.stress(1.0) == 0.0
    request.take(delta(0, 2))
    assert request.stress(3.0) == pytest.approx(102 * 3.0 / allowed_s(2.0, 0.1, 2))
    assert request.stress(4.0) == 0.0
    request.take(delta(2, 3))
    assert request.stress(5.0) == pytest.approx(3 * 5.0 / allowed_s(2.0, 0.1, 5))


class Pool:
    """A scheduler's core with one device, and a clock."""

    def __init__(self, directory: Path, *names: str) -> None:
        self.now_s = 0.0
        self.bench: Bench = settled(A, B)
        self.bench.report(*(listed(name, running=1) for name in names), gib=4.0)
        self.twu = DeviceTwu(self.bench.core, directory, lambda: self.now_s)

    def hear(self, record: ModelRecord, stress: float) -> None:
        """A gateway counted so much for a model."""
        row = ModelDemand(
            deployment=record.deployment,
            model_hash=record.model_hash,
            sla_class=SlaClass.GOLD,
            lane=Lane.SMALL,
            stress=stress,
        )
        self.twu.hear(IngressTelemetry(ingress=IngressId("g"), sequence=1, demand=(row,)))

    def told_weights(self) -> set[float]:
        """The weights in the digest of this moment, after the shell has looked at who gives way."""
        if (replicas := self.twu.gives_way()) is not None:
            self.bench.step(HeaviestGiveWay(replicas))
        self.bench.tick(1.1)
        digest = self.bench.core.digests.latest
        assert digest is not None
        assert len(digest.replicas) == len(self.bench.core.pool.replicas)
        return {row.weight for row in digest.replicas}

    def read(self) -> tuple[float | None, str]:
        """The row of the device."""
        (device,) = self.bench.core.pool.devices(usable=False)
        return self.twu.of(device)


def calibrated(directory: Path, **fields: object) -> None:
    """What ``carpool calibrate`` writes; it says more than is needed here."""
    found = {"twu_full": 0.25, "twu_free": 0.1, "baseline_tokens_per_s": 1000.0, "weights": {"a": 2.0}, "stages": []}
    (directory / FILE).write_text(json.dumps(found | fields))


def test_a_device_has_the_twu_of_what_its_replicas_did(tmp_path: Path) -> None:
    """By weight, over some seconds, with a word where it is full or has room; a model that is not there counts nothing."""
    pool = Pool(tmp_path, "a")
    pool.hear(A, 500.0)
    assert pool.read() == (None, "")
    calibrated(tmp_path)
    assert pool.read() == (0.2, "")
    pool.hear(B, 5000.0)
    assert pool.read() == (0.2, "")
    pool.hear(A, 250.0)
    assert pool.read() == (0.3, "full")
    pool.now_s = OVER_S
    assert pool.read() == (round(0.3 / math.e, 4), "")
    pool.now_s = 10 * OVER_S
    assert pool.read() == (0.0, "has room")


def test_a_model_that_was_not_calibrated_counts_by_its_size(tmp_path: Path) -> None:
    """1.0 for a small one; a file that cannot be read is as none, and one that is written anew is read."""
    pool = Pool(tmp_path, "b")
    pool.hear(B, 500.0)
    (tmp_path / FILE).write_text("{")
    assert pool.read() == (None, "")
    calibrated(tmp_path, weights={})
    assert pool.read() == (0.1, "")


def test_the_heaviest_model_of_a_stressed_device_gives_way(tmp_path: Path) -> None:
    """Above 0.8 by the site's scale gateways and replicas are told 0.6 of its weight; below it again the whole."""
    pool = Pool(tmp_path, "a", "b")
    calibrated(tmp_path, twu_full=TWU_FULL)
    pool.hear(A, 1750.0)
    assert pool.told_weights() == {1.0}
    pool.now_s = LOOK_EVERY_S
    pool.hear(A, 1250.0)
    assert pool.read()[1] == "full"
    assert pool.told_weights() == {HEAVIEST_FACTOR, 1.0}
    pool.now_s += 10 * OVER_S
    assert pool.told_weights() == {1.0}
