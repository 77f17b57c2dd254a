"""What a gateway's metrics tell of the pool."""

from __future__ import annotations

from broker.gateway.metrics import GatewayMetrics
from subjects.ids import ModelHash
from subjects.messages import PoolDigest, PoolKv, PoolModel


def lines(metrics: GatewayMetrics) -> set[str]:
    return {line for line in metrics.text().decode().splitlines() if line.startswith("kv_cache_")}


def digest(**models: PoolKv | None) -> PoolDigest:
    told = tuple(PoolModel(model_hash=ModelHash("a" * 64), name=name, kv=kv) for name, kv in models.items())
    return PoolDigest(epoch=1, sequence=1, models=told)


def test_kv_outside_engines_is_told_by_the_names_that_were_agreed() -> None:
    """Eviction rate and hit ratio by model, bytes by tier; nothing of models without any, nor of those that are gone
    (OPS-2)."""
    metrics = GatewayMetrics()
    metrics.kv_told(None)
    assert lines(metrics) == set()
    metrics.kv_told(
        digest(m=PoolKv(host_bytes=5, disk_bytes=7, hits=3, misses=1, evictions_per_s=510.0), n=None, o=PoolKv())
    )
    assert lines(metrics) == {
        'kv_cache_eviction_rate{model="m"} 510.0',
        'kv_cache_hit_ratio{model="m"} 0.75',
        'kv_cache_bytes{model="m",tier="host"} 5.0',
        'kv_cache_bytes{model="m",tier="disk"} 7.0',
        'kv_cache_eviction_rate{model="o"} 0.0',
        'kv_cache_bytes{model="o",tier="host"} 0.0',
        'kv_cache_bytes{model="o",tier="disk"} 0.0',
    }
    metrics.kv_told(digest(n=None))
    assert lines(metrics) == set()
