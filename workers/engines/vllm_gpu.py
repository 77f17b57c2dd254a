"""vLLM on a GPU by ``AsyncLLM``, its engine in a process of its own. UNVERIFIED: written without a GPU at hand.

What is shared with the CPU engine (render, derender, refusals, continuation) is verified there, and this class has run with
vLLM's multi-process engine on a CPU, of one process and of three shards, KV tiers included; CUDA and memory sizing have not
been seen to work.

vLLM's own process ends with this one: it watches its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from profiles.costs import sums_of
from subjects.errors import EngineError
from subjects.messages import Adapter, StepSums
from subjects.tasks import end_tasks
from workers.engines.adapter_gate import lora_request
from workers.engines.base import EngineInfo, EngineLoad, EngineRequest
from workers.engines.vllm_base import VllmBase
from workers.engines.vllm_process import one_line, prepare_process
from workers.spec import ReplicaSpec

if TYPE_CHECKING:
    from workers.engines.vllm_embed import EmbeddingAnswer
    from workers.engines.vllm_openai import Answer, Prompt

STEP_SMOOTHING = 0.1
"""Weight of the newest step in the running mean of step times."""
WATCH_EVERY_S = 0.5
"""How often the engine's process is asked after while nothing runs."""


class VllmGpuEngine(VllmBase):
    """The ``vllm`` engine on a GPU device (``gpu<index>``, by PCI order)."""

    def __init__(self, spec: ReplicaSpec) -> None:
        super().__init__(spec)
        self._devices = (spec.device, *spec.peers)
        self._sleeps = spec.record.engine_options.get("enable_sleep_mode") is True
        self._to_prime: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._started: EngineInfo | None = None
        self._kv_usage = 0.0
        self._waiting = 0
        self._step_began_s = self._step_s = 0.0
        self._sums = StepSums()
        self._stopped = False

    async def start(self) -> EngineInfo:
        """Starts vLLM's process and loads the weights, in a thread, since that blocks for up to minutes."""
        self._choose_device()
        prepare_process(on_cpu=False)
        try:
            self._engine = await asyncio.to_thread(self._build)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"{self._record.name}: {one_line(error)}") from None
        from workers.engines.vllm_openai import OpenAiLayer

        engine = self._engine
        self._layer = OpenAiLayer(self._record, engine.vllm_config, engine.renderer, engine.input_processor)
        self._hook_continuations()
        await self._open_kv()
        # One page of vLLM's pool is a placeholder.
        self._kv_pages = max((engine.vllm_config.cache_config.num_gpu_blocks or 1) - 1, 0)
        self._watch = asyncio.get_running_loop().create_task(self._watch_engine())
        self._started = self._info(engine.renderer.get_tokenizer(), sleeps=self._sleeps)
        return self._started

    def add(self, request: EngineRequest) -> None:
        """Starts the request's task; an idle engine's step begins with it."""
        if not self._running:
            self._step_began_s = time.monotonic()
        super().add(request)

    def load(self) -> EngineLoad:
        """Our own count wins over vLLM's last report, which stays as it was once nothing runs."""
        running = len(self._running)
        waiting = min(self._waiting, running)
        used = round(self._kv_usage * self._kv_pages) if running else 0
        free = max(self._kv_pages - used, 0)
        return EngineLoad(
            running - waiting,
            waiting,
            free,
            busy_s=self._sums.busy_s,
            step_s=self._step_s,
            sums=self._sums,
            hit_ratio=self._hits.ratio,
        )

    async def empty_prefixes(self) -> bool:
        """Drops vLLM's own prefix cache; False: something runs, nothing changed."""
        if self._running or not await self._engine.reset_prefix_cache():
            return False
        if self._kv is not None:
            await self._kv.emptied()
        return True

    async def sleep(self, level: int) -> None:
        """vLLM's own sleep mode, where the model's ``enable_sleep_mode`` asks for it."""
        if not self._sleeps:
            raise EngineError("sleep is not offered by this engine: set engine.options.enable_sleep_mode")
        await self._gate.clear()  # a sleep may lose them; each is loaded again at its next use
        await self._engine.sleep(level)
        if self._kv is not None:
            await self._kv.emptied()

    async def wake(self) -> EngineInfo:
        """Brings the weights back and an empty KV cache."""
        if self._started is None:
            raise EngineError("the engine was told to wake before it was started")
        try:
            await self._engine.wake_up()
        except Exception as error:
            raise EngineError(f"{self._record.name}: {one_line(error)}") from None
        return self._started

    async def stop(self) -> None:
        """Aborts what runs and ends vLLM's process."""
        if self._stopped:
            return
        self._stopped = True
        tasks = list(self._running.values())
        if self._watch is not None:
            tasks.append(self._watch)
        await end_tasks(tasks)
        await self._gate.close()
        if self._kv is not None:
            await self._kv.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    # ---------------------------------------------------------------------------------------------------------- starting

    def _choose_device(self) -> None:
        indexes = [device.removeprefix("gpu") for device in self._devices]
        if all(index.isdecimal() for index in indexes) and "CUDA_VISIBLE_DEVICES" not in os.environ:
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(indexes)

    def _build(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**self._arguments(), enable_log_requests=False)
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[self._make_counters])

    def _make_counters(self, vllm_config: Any, engine_index: int = 0) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        report, stepped, hits = self._report, self._stepped, self._hits

        class Counters(StatLoggerBase):  # type: ignore[misc] # the base class is not typed for us
            """Takes the scheduler's counters as they come."""

            def __init__(self) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
                if iteration_stats is not None:
                    stepped(iteration_stats)
                if scheduler_stats is not None:
                    prefixes = scheduler_stats.prefix_cache_stats
                    hits.add(prefixes.queries, prefixes.hits)
                    report(scheduler_stats.num_waiting_reqs, scheduler_stats.kv_cache_usage)

            def log_engine_initialized(self) -> None:
                pass

        return Counters()

    def _report(self, waiting: int, kv_usage: float) -> None:
        self._waiting, self._kv_usage = waiting, kv_usage

    def _stepped(self, iteration: Any) -> None:
        """A step's outputs came, one step after those before it, or after the first request came to an idle engine.

        vLLM tells prompts when their last part is prefilled, so a long one counts for the step that ended it.
        """
        now_s = time.monotonic()
        took_s, self._step_began_s = now_s - self._step_began_s, now_s
        prompts = len(iteration.time_to_first_tokens_iter)
        decoding = max(0, iteration.num_generation_tokens - prompts)
        prompt_tokens = iteration.prompt_token_stats.computed
        held = self._kv_usage * self._kv_pages * self._record.block_size
        step = StepSums(
            steps=1,
            prompt_tokens=prompt_tokens,
            prompt_tokens2=prompt_tokens * prompt_tokens // max(1, prompts),
            requests=decoding,
            context_tokens=round(held * decoding / max(1, decoding + prompts)),
        )
        self._sums = sums_of(self._sums, step, took_s)
        self._step_s += (took_s - self._step_s) * (STEP_SMOOTHING if self._step_s else 1.0)

    def _hook_continuations(self) -> None:
        # The detokenizer must be set before the first output can come, that is inside vLLM's own add_request.
        from workers.engines.vllm_openai import prime_continuation

        processor, pending = self._engine.output_processor, self._to_prime
        add_request = processor.add_request

        def add_and_prime(request: Any, *arguments: Any, **named: Any) -> None:
            add_request(request, *arguments, **named)
            continuation = pending.pop(request.external_req_id, None)
            if continuation is not None:
                prime_continuation(processor.request_states[request.request_id].detokenizer, *continuation)

        processor.add_request = add_and_prime

    # ----------------------------------------------------------------------------------------------------------- running

    async def _watch_engine(self) -> None:
        while not self._engine.errored:  # noqa: ASYNC110 (vLLM offers no event for it)
            await asyncio.sleep(WATCH_EVERY_S)
        self._die()

    def _die(self) -> None:
        self._outbox.die(EngineError(f"{self._record.name}: vLLM's engine process died"))

    async def _probe(self, tokens: int) -> list[int]:
        from workers.engines.vllm_openai import probe_parameters, probe_prompt, probed_tokens

        prompt = probe_prompt(self._engine.renderer.get_tokenizer())
        last: Any = None
        try:
            async for output in self._engine.generate(prompt, probe_parameters(tokens), "probe"):
                last = output
        except Exception as error:
            raise EngineError(f"{self._record.name}: the golden probe failed: {type(error).__name__}") from None
        if last is None:
            raise EngineError(f"{self._record.name}: the golden probe gave nothing")
        return probed_tokens(last)

    async def _run(self, request: EngineRequest) -> None:
        admitted = await self._admitted(request)
        if admitted is None:
            return
        answer, lora = admitted
        try:
            await self._generate_all(answer, lora)
        finally:
            if lora is not None:
                self._gate.leave((request.request, request.attempt))

    async def _load_adapter(self, adapter: Adapter, slot_id: int) -> None:
        await self._engine.add_lora(lora_request(adapter, slot_id))

    async def _evict_adapter(self, slot_id: int) -> None:
        await self._engine.remove_lora(slot_id)

    async def _generate_all(self, answer: Answer | EmbeddingAnswer, lora: Any) -> None:
        from workers.engines.vllm_openai import job_name

        request = answer.rendered.request
        prompts = answer.rendered.prompts
        names = [job_name(request, index) for index in range(len(prompts))]
        jobs = [
            asyncio.ensure_future(self._generate(answer, index, prompt, name, lora))
            for index, (prompt, name) in enumerate(zip(prompts, names, strict=True))
        ]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
            for name in names:
                self._to_prime.pop(name, None)
            if not answer.ended or len(names) > 1:
                with contextlib.suppress(Exception):
                    await asyncio.shield(self._engine.abort(names))

    async def _generate(self, answer: Answer | EmbeddingAnswer, index: int, prompt: Prompt, name: str, lora: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        from workers.engines.vllm_refusals import refusal

        if prompt.rendered_ids:
            self._to_prime[name] = (prompt.rendered_ids, answer.rendered.request.sent_token_ids)
        began_s: float | None = time.monotonic()
        try:
            async for output in self._engine.generate(prompt.engine_input, prompt.params, name, lora_request=lora):
                if self._kv is not None and began_s is not None:
                    # Its wait is in this too, so the speed is rather under- than overestimated.
                    computed = prompt.prompt_tokens - (output.num_cached_tokens or 0)
                    self._kv.speed.took(computed, time.monotonic() - began_s)
                began_s = None
                deltas = answer.take(index, output)
                if deltas:
                    self._outbox.put(deltas)
                if answer.ended:
                    return
        except EngineDeadError:
            self._die()
        except Exception as error:
            if not answer.ended:
                self._outbox.put([answer.fail(refusal(error, answer.rendered.request))])
