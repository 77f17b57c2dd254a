"""vLLM on the CPU, in this process: its synchronous engine in one thread.

The thread owns the engine. It sleeps while there is no work, else it takes what is in its inbox, makes one step, and hands
the step's deltas to the event loop as one item. Rendering runs before that, on the event loop and vLLM's tokeniser thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from profiles.costs import sums_of
from subjects.errors import EngineError
from subjects.ids import RequestId
from subjects.messages import Adapter, Delta, DeviceKind, StepSums
from workers.core.held_request import Key
from workers.engines.adapter_gate import lora_request
from workers.engines.base import EngineInfo, EngineLoad, EngineRequest
from workers.engines.vllm_base import VllmBase
from workers.engines.vllm_process import one_line, prepare_process
from workers.spec import ReplicaSpec

if TYPE_CHECKING:
    from workers.engines.vllm_embed import EmbeddingAnswer
    from workers.engines.vllm_openai import Answer

STEP_SMOOTHING = 0.1
"""Weight of the newest step in the running mean of step times."""
IDLE_STEP_WAIT_S = 0.002
"""Pause after a step that ran no model (a grammar is still being compiled): work will come, but not from spinning."""
LOAD_WAIT_S = 0.02
"""Pause while KV is being loaded and nothing else is to be done; bounds how late a load is given up."""
STOP_TIMEOUT_S = 10.0
"""A step that does not end in this time belongs to a process that is about to exit anyway."""


class VllmEngine(VllmBase):
    """The ``vllm`` engine on CPU. One per process: vLLM keeps process globals."""

    device_kind = DeviceKind.CPU
    chunk_tokens = 512

    def __init__(self, spec: ReplicaSpec) -> None:
        super().__init__(spec)
        self._threads = spec.threads
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._error: EngineError | None = None
        # Below here, and the engine itself: written by the engine's thread only.
        self._scheduler: Any = None
        self._jobs: dict[str, _Job | _Probe] = {}
        self._busy_s = 0.0
        self._step_s = 0.0
        self._planned = StepSums()
        """What the step that runs does."""
        self._sums = StepSums()

    async def start(self) -> EngineInfo:
        """Builds the engine in its thread (1 to 7 s once vLLM is imported)."""
        self._loop = asyncio.get_running_loop()
        built: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run_thread, args=(built,), name="vllm-engine", daemon=True)
        self._thread.start()
        info = await built
        await self._open_kv()
        return info

    def abort(self, request: RequestId, attempt: int) -> None:
        """Stops it before the next step."""
        key = (request, attempt)
        admission = self._running.get(key)
        if admission is not None:
            admission.cancel()
        if self._outbox.mute(key):
            self._inbox.put(lambda: self._abort(key))

    def load(self) -> EngineLoad:
        """Counters of vLLM's own scheduler."""
        # The engine's thread may drop it at any moment.
        scheduler = self._scheduler
        if scheduler is None:
            return EngineLoad(running=0, waiting=len(self._running), kv_pages_free=self._kv_pages)
        running, _ = scheduler.get_request_counts()
        # Its own count of waiting ones leaves out those whose grammar is being compiled.
        return EngineLoad(
            running=running,
            waiting=max(len(scheduler.requests) - running, 0) + len(self._running),
            kv_pages_free=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            busy_s=self._busy_s,
            step_s=self._step_s,
            sums=self._sums,
            hit_ratio=self._hits.ratio,
        )

    async def stop(self) -> None:
        """Ends the thread after its current step and drops the engine."""
        if self._thread is None or self._stopping:
            return
        self._stopping = True
        for task in list(self._running.values()):
            task.cancel()
        await self._gate.close()
        if self._kv is not None:
            await self._kv.close()
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    async def empty_prefixes(self) -> bool:
        """Drops the engine's own prefix cache; what the KV tiers hold stays. False: something runs, nothing changed."""
        emptied = []
        await self._in_engine(lambda engine: emptied.append(engine.reset_prefix_cache()))
        if emptied[0] and self._kv is not None:
            await self._kv.emptied()
        return bool(emptied[0])

    # ------------------------------------------------------------------------------------------------- on the event loop

    async def _run(self, request: EngineRequest) -> None:
        admitted = await self._admitted(request)
        if admitted is not None:
            self._inbox.put(lambda: self._add(*admitted))

    async def _load_adapter(self, adapter: Adapter, slot_id: int) -> None:
        lora = lora_request(adapter, slot_id)
        await self._in_engine(lambda engine: engine.add_lora(lora))

    async def _evict_adapter(self, slot_id: int) -> None:
        await self._in_engine(lambda engine: engine.remove_lora(slot_id))

    async def _in_engine(self, work: Callable[[Any], object]) -> None:
        """Runs ``work`` between two steps and raises what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def run() -> None:
            failure: Exception | None = None
            try:
                work(self._engine)
            except Exception as error:
                failure = error
            self._call(_settle, done, None, failure)

        self._inbox.put(run)
        await done

    async def _probe(self, tokens: int) -> list[float]:
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[float]] = loop.create_future()
        self._inbox.put(lambda: self._add_probe(_Probe(loop=loop, done=done, embeds=self._embeds), tokens))
        return await done

    # -------------------------------------------------------------------------------------------- in the engine's thread

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        # The loop may be closed already when a process ends in the middle of a step.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *arguments)

    def _run_thread(self, built: asyncio.Future[EngineInfo]) -> None:
        loop = built.get_loop()
        try:
            info = self._build()
        except BaseException as error:
            failure = error if isinstance(error, EngineError) else EngineError(f"{self._record.name}: {one_line(error)}")
            loop.call_soon_threadsafe(_settle, built, None, failure)
            return
        loop.call_soon_threadsafe(_settle, built, info, None)
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self._die(error)
        finally:
            self._drop()

    def _build(self) -> EngineInfo:
        os.environ["OMP_NUM_THREADS"] = str(self._threads)
        prepare_process(on_cpu=True)
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from workers.engines.vllm_openai import OpenAiLayer, register_architecture

        # OpenMP's thread count belongs to the thread that sets it, and vLLM forbids the call once a worker exists.
        torch.set_num_threads(self._threads)
        register_architecture(self._record.source)
        arguments = {"enforce_eager": True, **self._arguments()}
        if self._record.adapters_max:
            from workers.engines import vllm_lora_cpu

            vllm_lora_cpu.install()
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        scheduler = engine.engine_core.engine_core.scheduler
        if self._embeds:
            from workers.engines.vllm_embed import EmbeddingLayer

            if "embed" not in engine.get_supported_tasks():
                raise EngineError(
                    f"{self._record.name}: vLLM makes no embeddings of this model; write 'spec.task: generate'"
                )
            self._layer = EmbeddingLayer(engine.vllm_config, engine.renderer)
        else:
            self._layer = OpenAiLayer(self._record, engine.vllm_config, engine.renderer, engine.input_processor)
        self._kv_pages = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self._engine, self._scheduler = engine, scheduler
        self._hook_steps()
        self._hook_loads()
        return self._info(engine.get_tokenizer())

    def _hook_steps(self) -> None:
        """Notes what each step does when vLLM plans it."""
        from workers.engines.vllm_turns import planned

        schedule = self._scheduler.schedule

        def plan(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            self._planned = planned(output, self._scheduler.requests)
            return output

        self._scheduler.schedule = plan

    def _hook_loads(self) -> None:
        """A load of KV that is over wakes the thread, which sleeps while nothing else is to be done."""
        if self._kv is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            worker = get_kv_transfer_group().worker
            if worker is not None:
                worker.loader.wake = lambda: self._inbox.put(lambda: None)

    def _has_work(self) -> bool:
        # With a connector also what requests leave behind: blocks of a load that was aborted, uses that are to be told.
        return bool(self._engine.has_unfinished_requests() or (self._kv is not None and self._scheduler.has_requests()))

    def _turn(self) -> None:
        """Takes the inbox, sleeping on it when there is nothing to generate, and makes one step."""
        if not self._has_work():
            self._inbox.get()()
        self._empty_inbox()
        if self._stopping or not self._has_work():
            return
        began_s = time.monotonic()
        outputs = self._engine.step()
        took_s = time.monotonic() - began_s
        self._busy_s += took_s
        self._step_s += (took_s - self._step_s) * (STEP_SMOOTHING if self._step_s else 1.0)
        if self._planned.steps:
            self._sums = sums_of(self._sums, self._planned, took_s)
        if self._kv is not None:
            self._kv.speed.took(self._prompt_tokens(), took_s)
        deltas: list[Delta] = []
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            deltas.extend(job.take(output))
            if job.ended:
                if isinstance(job, _Job):
                    self._hits.add(len(output.prompt_token_ids or ()), max(0, output.num_cached_tokens or 0))
                self._forget(output.request_id, job)
        if deltas:
            self._call(self._outbox.put, deltas)
        elif not outputs and not self._scheduler.running:
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=LOAD_WAIT_S if self._loads_only() else IDLE_STEP_WAIT_S)()

    def _prompt_tokens(self) -> int:
        side = self._scheduler.connector.scheduler
        return side.scheduled_prompt_tokens if side is not None else 0

    def _loads_only(self) -> bool:
        """Whether all that is to be done waits for KV, which wakes the thread when it has come."""
        if self._kv is None:
            return False
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().worker
        return worker is not None and worker.loader.open > 0

    def _empty_inbox(self) -> None:
        while True:
            try:
                action = self._inbox.get_nowait()
            except queue.Empty:
                return
            action()

    def _add(self, answer: Answer | EmbeddingAnswer, lora: Any) -> None:
        from workers.engines.vllm_openai import job_name, prime_continuation
        from workers.engines.vllm_refusals import refusal

        rendered = answer.rendered
        names = []
        try:
            for index, prompt in enumerate(rendered.prompts):
                name = job_name(rendered.request, index)
                names.append(name)
                internal = self._engine.add_request(name, prompt.engine_input, prompt.params, lora_request=lora)
                self._jobs[name] = _Job(answer, index)
                if prompt.rendered_ids:
                    state = self._engine.output_processor.request_states[internal]
                    prime_continuation(state.detokenizer, prompt.rendered_ids, rendered.request.sent_token_ids)
        except Exception as error:
            # vLLM validates in here too (parameters, schemas); an error leaves its state as it was.
            for name in names:
                self._jobs.pop(name, None)
            self._engine.abort_request(names)
            self._leave(rendered.request)
            self._call(self._outbox.put, [answer.fail(refusal(error, rendered.request))])

    def _add_probe(self, probe: _Probe, tokens: int) -> None:
        from workers.engines.vllm_openai import probe_parameters, probe_prompt

        name = f"probe.{id(probe)}"
        try:
            parameters = probe_parameters(tokens)
            if probe.embeds:
                from workers.engines import vllm_embed

                parameters = vllm_embed.probe_parameters()
            self._engine.add_request(name, probe_prompt(self._engine.get_tokenizer()), parameters)
        except Exception as error:
            probe.settle([], EngineError(f"{self._record.name}: the golden probe was refused: {type(error).__name__}"))
            return
        self._jobs[name] = probe

    def _abort(self, key: Key) -> None:
        self._remove(key)
        self._call(self._outbox.over, key)

    def _remove(self, key: Key) -> None:
        jobs = {
            name: job.answer.rendered.request
            for name, job in self._jobs.items()
            if isinstance(job, _Job) and (job.answer.rendered.request.request, job.answer.rendered.request.attempt) == key
        }
        if jobs:
            self._engine.abort_request(list(jobs))
            for name in jobs:
                del self._jobs[name]
            self._leave(next(iter(jobs.values())))

    def _leave(self, request: EngineRequest) -> None:
        """Its adapter is no longer used by it."""
        if request.adapter is not None:
            self._call(self._gate.leave, (request.request, request.attempt))

    def _forget(self, name: str, job: _Job | _Probe) -> None:
        if isinstance(job, _Probe):
            del self._jobs[name]
            return
        request = job.answer.rendered.request
        # Ended by a failure, sibling prompts may still run.
        self._remove((request.request, request.attempt))

    def _die(self, error: BaseException) -> None:
        self._error = EngineError(f"{self._record.name}: the engine died: {one_line(error)}")
        for job in self._jobs.values():
            if isinstance(job, _Probe):
                job.settle([], self._error)
        self._call(self._outbox.die, self._error)

    def _drop(self) -> None:
        engine, self._engine, self._scheduler, self._layer = self._engine, None, None, None
        self._jobs.clear()
        with contextlib.suppress(Exception):
            engine.engine_core.shutdown()
            engine.renderer.shutdown()


@dataclass(slots=True)
class _Job:
    """One prompt of a request inside vLLM."""

    answer: Answer | EmbeddingAnswer
    prompt_index: int

    @property
    def ended(self) -> bool:
        return self.answer.ended

    def take(self, output: Any) -> list[Delta]:
        return self.answer.take(self.prompt_index, output)


@dataclass(slots=True)
class _Probe:
    """The warm-up's own request."""

    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[list[float]]
    embeds: bool
    ended: bool = False

    def take(self, output: Any) -> list[Delta]:
        from workers.engines.vllm_openai import probed_tokens

        self.ended = True
        try:
            if self.embeds:
                from workers.engines.vllm_embed import probed_vector

                self.settle(probed_vector(output), None)
            else:
                self.settle([float(token) for token in probed_tokens(output)], None)
        except EngineError as error:
            self.settle([], error)
        return []

    def settle(self, answer: list[float], error: EngineError | None) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_settle, self.done, answer, error)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
