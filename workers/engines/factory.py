"""Which engine a replica runs. Imports are late: a replica loads only the engine it needs."""

from __future__ import annotations

from typing import assert_never

from subjects.errors import EngineError
from subjects.messages import EngineType, Task
from workers.engines.base import Engine
from workers.spec import ReplicaSpec

CPU_DEVICE_PREFIX = "cpu"


def runs_on_cpu(spec: ReplicaSpec) -> bool:
    """Whether the replica's device is a CPU device; device ids start with their kind."""
    return spec.device.startswith(CPU_DEVICE_PREFIX)


def make_engine(spec: ReplicaSpec) -> Engine:
    """The engine for ``spec``, not yet started.

    Raises:
        EngineError: its options are wrong, or its package is not installed.
    """
    match spec.record.engine_type:
        case EngineType.VLLM:
            if runs_on_cpu(spec):
                from workers.engines.vllm_cpu import VllmEngine

                return VllmEngine(spec)
            if spec.record.task is Task.EMBED:
                raise EngineError(f"{spec.record.name}: engine vllm makes embeddings on CPU only; use openai_http")
            from workers.engines.vllm_gpu import VllmGpuEngine

            return VllmGpuEngine(spec)
        case EngineType.OPENAI_HTTP:
            from workers.engines.openai_http import OpenAiHttpEngine

            return OpenAiHttpEngine(spec)
        case EngineType.SIMULATED:
            from workers.engines.simulated import SimulatedEngine

            return SimulatedEngine(spec)
        case _:
            assert_never(spec.record.engine_type)
