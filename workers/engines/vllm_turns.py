"""vLLM's scheduler with a device turn around each step: named to vLLM as ``scheduler_cls``.

One step is ``schedule``, the model, ``update_from_output``, all called by the same thread of vLLM's engine core, on CPU and
on GPU alike; vLLM switches asynchronous scheduling off for a scheduler of one's own. The configuration comes in vLLM's
``additional_config``, since the engine core may live in a process of its own.

Before a step it also asks how many prompt tokens young answers allow (``workers.core.young``). None: prompts are left out,
as vLLM itself does for data-parallel engines on ``schedule(throttle_prefills=True)``. Some: a smaller budget of tokens, with
those that decode before those that are partly prefilled, so that each of them has its token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from profiles.costs import chunk_tokens
from subjects.messages import ModelRecord, StepSums
from workers.core.young import STEP_TOKENS_MAX, YoungAnswers
from workers.spec import ReplicaSpec
from workers.turns import DeviceTurns

CONFIG_KEY = "carpool_turns"
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
PACE_SHARE = 0.5
"""Of the time per token that a model promises; the simulator's engines have the same."""


def turn_arguments(spec: ReplicaSpec) -> dict[str, Any]:
    """Keyword arguments of ``EngineArgs``, none where the replica takes no turns."""
    if not spec.turns_directory:
        return {}
    record = spec.record
    turns = {
        "directory": spec.turns_directory,
        "devices": [spec.device, *spec.peers],
        "pace_s": PACE_SHARE * record.sla.tpot_ms / 1000,
        "tpot_s": record.sla.tpot_ms / 1000,
        "ttft_s": record.sla.ttft_p95_ms / 1000,
        "least_tokens": _least_tokens(record),
    }
    arguments = {"scheduler_cls": TurnTakingScheduler, "additional_config": {CONFIG_KEY: turns}}
    if record.costs and "max_num_batched_tokens" not in record.engine_options:
        # Not the half of a time per token that an engine without turns gets: how much a step takes follows from who waits.
        arguments["max_num_batched_tokens"] = max(STEP_TOKENS_MAX, record.max_num_seqs)
    return arguments


def _least_tokens(record: ModelRecord) -> int:
    """What half a time per token prefills; without measured costs whatever a step takes."""
    tpot_s = record.sla.tpot_ms / 1000
    return min((chunk_tokens(costs, tpot_s) for costs in record.costs.values()), default=STEP_TOKENS_MAX)


def planned(output: Any, requests: Mapping[str, Any]) -> StepSums:
    """What a step that vLLM's scheduler has just planned will do; ``requests`` are the scheduler's."""
    prompt_tokens = prompt_tokens2 = decoding = context_tokens = 0
    for name, tokens in output.num_scheduled_tokens.items():
        request = requests[name]
        end = request.num_computed_tokens
        if tokens == 1 and end > request.num_prompt_tokens:
            decoding += 1
            context_tokens += end
        else:
            prompt_tokens += tokens
            prompt_tokens2 += end * end - (end - tokens) ** 2
    return StepSums(
        steps=1 if output.total_num_scheduled_tokens else 0,
        prompt_tokens=prompt_tokens,
        prompt_tokens2=prompt_tokens2,
        requests=decoding,
        context_tokens=context_tokens,
    )


class TurnTakingScheduler(Scheduler):  # type: ignore[misc]  # vLLM comes without types
    """Takes the turn before it plans a step and gives it back when its results are in."""

    max_num_scheduled_tokens: int
    prefill_capacity_bound: bool

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        turns = vllm_config.additional_config[CONFIG_KEY]
        self.turns = DeviceTurns(Path(turns["directory"]), tuple(turns["devices"]), float(turns["pace_s"]))
        self.young = YoungAnswers(tpot_s=float(turns["tpot_s"]), ttft_s=float(turns["ttft_s"]))
        self.decode_only_steps = 0
        """Steps in which prompts waited for young answers."""
        self._least_tokens = int(turns["least_tokens"])
        # Of the step that runs: its wait for the turn, when it began, the prompt tokens in it.
        self._step = (0.0, 0.0, 0)

    def add_request(self, request: Any) -> None:
        # By a clock that never jumps, unlike the request's own time of arrival: the bound on its wait hangs on it.
        self.young.came(time.monotonic(), request.request_id)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        asked_s = time.monotonic()
        most = self.max_num_scheduled_tokens
        allowed = most
        prompts = (
            bool(self.waiting)
            or any(request.is_prefill_chunk for request in self.running)
            or any(True for _ in self._with_blocks())
        )
        if prompts:
            least = min(self._least_tokens, most)
            allowed = self.young.prompt_tokens(asked_s, self._answers(), self._prompts(), least=least, most=most)
        self.turns.take(urgent=prompts and allowed > 0)
        began_s = time.monotonic()
        try:
            if allowed == 0:
                self.decode_only_steps += 1
                output = self._schedule_decodes()
            elif allowed < most:
                output = self._schedule_some(allowed, throttle_prefills)
            else:
                output = super().schedule(throttle_prefills)
        except BaseException:
            self.turns.give()
            raise
        if output.total_num_scheduled_tokens == 0:
            self.turns.give()
        # Each request in a step computes one token at least, as one that decodes does; the others are of prompts.
        prompt_tokens = output.total_num_scheduled_tokens - len(output.num_scheduled_tokens)
        self._step = (began_s - asked_s, began_s, prompt_tokens)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().update_from_output(scheduler_output, *args, **kwargs)
        finally:
            self.turns.give()
            self._observe(bool(scheduler_output.total_num_scheduled_tokens))

    def _answers(self) -> Iterator[tuple[str, int]]:
        return ((one.request_id, one.num_output_tokens) for one in self.running if not one.is_prefill_chunk)

    def _prompts(self) -> Iterator[tuple[str, int]]:
        """With what may be cached of those that wait: vLLM looks that up when it admits them."""
        for request in self.waiting:
            yield request.request_id, request.num_tokens - request.num_computed_tokens
        for request in self._with_blocks():
            yield request.request_id, request.num_tokens - request.num_computed_tokens
        for request in self.running:
            if request.is_prefill_chunk:
                yield request.request_id, request.num_tokens - request.num_computed_tokens

    def _with_blocks(self) -> Iterator[Any]:
        """Requests whose KV was loaded from outside; those whose KV is still being loaded need no step."""
        for request in self.kv_holding_waiting:
            if request.status is not LOADING or request.request_id in self.finished_recving_kv_req_ids:
                yield request

    def _schedule_decodes(self) -> Any:
        # vLLM would prefill all the same once a step could not take in all that waits; for young answers it must not.
        bound, self.prefill_capacity_bound = self.prefill_capacity_bound, False
        try:
            return super().schedule(True)
        finally:
            self.prefill_capacity_bound = bound

    def _schedule_some(self, prompt_tokens: int, throttle_prefills: bool) -> Any:
        # The budget is spent in the order of this list. Sorting keeps the order of admission within both kinds.
        self.running.sort(key=lambda request: request.is_prefill_chunk)
        decoding = sum(not request.is_prefill_chunk for request in self.running)
        most = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(most, decoding + prompt_tokens)
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = most

    def _observe(self, ran: bool) -> None:
        now_s = time.monotonic()
        if ran:
            wait_s, began_s, prompt_tokens = self._step
            self.young.times.took(wait_s, now_s - began_s, prompt_tokens)
        for request in self.running:
            if request.num_output_tokens:
                self.young.answered(now_s, request.request_id)
        if len(self.young) != len(self.requests):
            self.young.keep(self.requests)

    def shutdown(self) -> None:
        super().shutdown()
        self.turns.close()
