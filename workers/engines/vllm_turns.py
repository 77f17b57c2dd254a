"""vLLM's scheduler with a device turn around each step: named to vLLM as ``scheduler_cls``.

One step is ``schedule``, the model, ``update_from_output``, all called by the same thread of vLLM's engine core, on CPU and
on GPU alike; vLLM switches asynchronous scheduling off for a scheduler of one's own. The configuration comes in vLLM's
``additional_config``, since the engine core may live in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from workers.spec import ReplicaSpec
from workers.turns import DeviceTurns

CONFIG_KEY = "carpool_turns"
PACE_SHARE = 0.5
"""Of the time per token that a model promises; the simulator's engines have the same."""


def turn_arguments(spec: ReplicaSpec) -> dict[str, Any]:
    """Keyword arguments of ``EngineArgs``, none where the replica takes no turns."""
    if not spec.turns_directory:
        return {}
    turns = {
        "directory": spec.turns_directory,
        "devices": [spec.device, *spec.peers],
        "pace_s": PACE_SHARE * spec.record.sla.tpot_ms / 1000,
    }
    return {"scheduler_cls": TurnTakingScheduler, "additional_config": {CONFIG_KEY: turns}}


class TurnTakingScheduler(Scheduler):  # type: ignore[misc]  # vLLM comes without types
    """Takes the turn before it plans a step and gives it back when its results are in."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        turns = vllm_config.additional_config[CONFIG_KEY]
        self.turns = DeviceTurns(Path(turns["directory"]), tuple(turns["devices"]), float(turns["pace_s"]))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        prefills = any(request.num_computed_tokens < request.num_prompt_tokens for request in self.running)
        self.turns.take(urgent=bool(self.waiting) or prefills)
        try:
            output = super().schedule(*args, **kwargs)
        except BaseException:
            self.turns.give()
            raise
        if output.total_num_scheduled_tokens == 0:
            self.turns.give()
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().update_from_output(*args, **kwargs)
        finally:
            self.turns.give()

    def shutdown(self) -> None:
        super().shutdown()
        self.turns.close()
