"""The gateway: takes requests in, owns each from its first byte to its last, and gives its answer out.

What decides is pure and lives in ``broker/core``: :class:`broker.core.requests.core.RequestCore` (who runs what) and
:mod:`broker.core.requests.admission` (what is taken on). This file joins them with the bus, the registry and the ways in
(HTTP in :mod:`broker.gateway.app`, NATS in :mod:`broker.gateway.nats_ingress`). Prompts and answers never reach a log, a
metric or a subject.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn, TypeVar

import msgspec
import structlog

from broker.api.openai_answers import AnswerHead
from broker.api.openai_bodies import ParsedBody, parse_body
from broker.core.requests import admission as adm
from broker.core.requests import events as ev
from broker.core.requests.affinity import COSTS_DEFAULT, PromptPrefix, ReuseCosts, engine_spans, prompt_prefix, reuse_costs
from broker.core.requests.events import Failed as CoreFailed
from broker.gateway.ask_headers import header, request_kind, timeout_s_of, wish_of
from broker.gateway.exchange import Ask, Ended, Exchange, Failed, unavailable
from broker.gateway.metrics import UNRESOLVED, GatewayMetrics
from broker.gateway.models import ModelTable
from broker.gateway.recent_requests import RecentRequests
from broker.gateway.request_shell import RequestShell
from kvcache.core.prefix_index import PrefixIndex
from kvcache.wire.index_sync import IndexSync
from profiles.blocks import engine_salt
from profiles.deployment import parses_with
from profiles.features import OutputLengths, RequestContext, profile_and_chain
from profiles.tokenizer import ModelTokenizer, PromptTokenizer
from subjects import messages as m
from subjects import names
from subjects.bus import Bus, BusMessage, KvEntry, Subscription
from subjects.codec import decode, encode
from subjects.errors import ApiError, BusError, DecodeError, place_of
from subjects.ids import IngressId, RequestId, Tenant, incarnated
from subjects.tasks import Tasks

TELEMETRY_EVERY_S = 0.1
BUS_LOST_S_MAX = 2.0
"""A shorter loss of the bus is ridden out; after it new requests get 503 at once."""
START_RETRY_S = 0.5
READ_AGAIN_EVERY_S = 0.1
"""How often names that nobody knows may have the bucket of models read again."""
TOKENISED_INLINE_BYTES_MAX = 16 * 1024
"""Longer bodies are tokenised in a thread, so that one long prompt does not stop all streams."""
TOKENISER_THREADS = 2
OPENING_MAX = 512
"""Requests that are checked and tokenised at once; each may hold a large body."""
REUSE_COSTS_MAX = 4096
"""Models whose costs of reuse are kept at hand."""
DIGEST_KEY = "digest"

_CLIENT_LEFT = CoreFailed(499, "The client left.", type="invalid_request_error", code="client_left")

_T = TypeVar("_T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """How a gateway behaves, whichever way requests come in."""

    name: str = "gateway"
    queue_shards: int = 1
    limits: adm.Limits = field(default_factory=adm.Limits)
    request_s_max: float = 600.0
    """The deadline of a request that brings none, and the latest that it may bring."""
    trust_domains: Mapping[Tenant, str] = field(default_factory=dict)
    """Whose KV a tenant's requests may reuse, as ``broker.gateway.keys.ApiKeys`` reads them; else only its own."""


class _Profiled(NamedTuple):
    profile: m.RequestProfile
    salt: str
    """What its trust domain's KV is salted with, in hex."""
    prefix: PromptPrefix | None


@dataclass(slots=True)
class _Live:
    exchange: Exchange
    ask: Ask
    body: ParsedBody
    view: adm.ModelView
    profile: m.RequestProfile
    salt: str
    prefix: PromptPrefix | None
    arrived_s: float
    wait_until_s: float
    deadline_s: float
    first_output_s: float | None = None
    granted: bool = False
    waited_s: float = 0.0
    """For the last grant. It is counted with the first output: a replica may say that it has no room after all."""
    finish_reasons: list[str] = field(default_factory=list)


class Gateway:
    """One ingress of the pool."""

    def __init__(self, bus: Bus, options: GatewayOptions | None = None) -> None:
        self._bus = bus
        self._options = options or GatewayOptions()
        self.ingress = IngressId(incarnated(self._options.name))
        self.metrics = GatewayMetrics()
        self.started_unix_s = int(time.time())
        self.digest: m.PoolDigest | None = None
        self._models = ModelTable()
        self._admission = adm.Admission(self._options.limits)
        self.prefixes = PrefixIndex()
        """Who holds the KV of which prompts."""
        self._kv_sync = IndexSync(bus, self.prefixes, self.ingress, discarded=self.discarded)
        self._reuse: dict[str, tuple[m.ModelRecord, ReuseCosts]] = {}
        shards = self._options.queue_shards
        self._shell = RequestShell(bus, self.ingress, self, queue_shards=shards, prefixes=self.prefixes)
        self._lengths = OutputLengths()
        self._live: dict[RequestId, _Live] = {}
        self._recent = RecentRequests()
        self._numbers = itertools.count(1)
        self._opening = 0
        self._telemetry_sequence = 0
        self._draining = False
        self._registry_read = False
        self._registry_changes = 0
        self._reading_again: asyncio.Task[None] | None = None
        self._read_again_s = 0.0
        self._bus_lost_s: float | None = time.monotonic() - BUS_LOST_S_MAX
        self._idle = asyncio.Event()
        self._telemetry_now = asyncio.Event()
        self._bus_back = asyncio.Event()
        self._loops = Tasks(self.broke)
        self._resubmits = Tasks(self.broke)
        self._questions = Tasks(lambda error: log.error("a question was not answered", error=place_of(error)))
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when a part of the gateway ended that must not: the process should end too, and be started again."""
        self._subscriptions: list[Subscription] = []
        self._threads = ThreadPoolExecutor(TOKENISER_THREADS, thread_name_prefix="tokenise")

    # ------------------------------------------------------------------------------------------------- start and end

    async def start(self) -> None:
        """Begins to serve; returns at once even when there is no bus yet (PAINS L3)."""
        self._bus.on_reconnected(self._bus_back.set)
        await self._shell.start()
        self._subscriptions.append(await self._bus.subscribe(names.POOL, self._on_digest))
        self._subscriptions.append(await self._bus.subscribe(names.why(self.ingress), self._on_question))
        await self._kv_sync.start()
        self._loops.spawn(self._read_registry(), self._send_telemetry())

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits for the running ones; those still there after ``timeout_s`` end with an error."""
        self._draining = True
        self._shell.step(ev.ShutdownStarted(time.monotonic() + timeout_s))
        if self._live:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s + 2.0)
            except TimeoutError:
                log.warning("requests did not end in time", requests=len(self._live))
        for live in list(self._live.values()):
            live.exchange.close(Failed(_shutting_down()))

    async def stop(self) -> None:
        """Ends all tasks; the bus is the caller's."""
        self._draining = True
        await self._resubmits.end()
        await self._questions.end()
        await self._loops.end()
        await self._kv_sync.stop()
        for subscription in self._subscriptions:
            await subscription.stop()
        await self._shell.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read_registry(self) -> None:
        """The bucket of models, and the last digest for a start without waiting for the next one."""
        self._subscriptions.append(await self._bus.kv_watch(names.MODELS_BUCKET, self._on_record))
        while True:
            try:
                for entry in await self._bus.kv_entries(names.MODELS_BUCKET):
                    self._models.record_changed(entry.key, entry)
                last = await self._bus.kv_get(names.POOL_BUCKET, DIGEST_KEY)
            except BusError as error:
                log.debug("the registry cannot be read yet", error=str(error))
                self._bus_back.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._bus_back.wait(), START_RETRY_S)
                continue
            if last is not None and self.digest is None:
                self._take_digest(last.value)
            self._registry_read = True
            return

    async def _read_again(self) -> None:
        """Before a name is called unknown: it may have been applied a moment ago, and the news of it be on its way.

        One read serves all who wait for one. It only adds, adapters too; what goes away the watch tells.
        """
        if self._reading_again is None or self._reading_again.done():
            self._reading_again = asyncio.get_running_loop().create_task(self._read_new_records())
        await asyncio.wait({self._reading_again})

    async def _read_new_records(self) -> None:
        await asyncio.sleep(max(0.0, self._read_again_s + READ_AGAIN_EVERY_S - time.monotonic()))
        self._read_again_s = time.monotonic()
        before = self._registry_changes
        with suppress(BusError):
            entries = await self._bus.kv_entries(names.MODELS_BUCKET)
            if before == self._registry_changes:  # else the watch works, and knows better
                for entry in entries:
                    self._models.record_changed(entry.key, entry, only_newer=True)

    # -------------------------------------------------------------------------------------------------- what is known

    @property
    def bus_connected(self) -> bool:
        """Whether the bus is there as far as we know."""
        return self._bus.connected

    def unready_reason(self) -> str:
        """Why new requests would be refused now; empty when they would not."""
        if self._draining:
            return "shutting down"
        if not self._bus.connected:
            return "bus lost"
        return "" if self._registry_read else "starting"

    def model_states(self) -> list[tuple[adm.ModelView, str]]:
        """Every known model, unloaded ones too (PAINS B3), then every adapter, with the state of its replicas."""
        views = (*self._models.views(), *self._models.adapters())
        return [(view, self._models.state(view.record)) for view in views]

    def state_of(self, name: str) -> tuple[adm.ModelView, str]:
        """The model or adapter of a name or alias, with the state of its replicas.

        Raises:
            ApiError: 404, nobody configured the name.
        """
        view = self._models.resolve(name) or _raise(adm.unknown_model(name))
        return view, self._models.state(view.record)

    def metrics_text(self) -> bytes:
        """All figures of now, in Prometheus's exposition format; what is counted by looking is looked at here."""
        metrics = self.metrics
        known = [view.name for view in (*self._models.views(), *self._models.adapters())]
        for gauge, granted in ((metrics.waiting, False), (metrics.running, True)):
            counts = Counter(live.view.name for live in self._live.values() if live.granted is granted)
            gauge.clear()
            for name in dict.fromkeys((*known, *counts)):
                gauge.labels(name).set(counts[name])
        metrics.kv_told(self.digest)
        metrics.in_flight.set(len(self._live))
        metrics.bus_connected.set(self._bus.connected)
        metrics.prefix_holdings.set(self.prefixes.holdings)
        if self._shell.round_trip_s is not None:
            metrics.bus_round_trip_s.set(self._shell.round_trip_s)
        return metrics.text()

    # ---------------------------------------------------------------------------------------------------- a request in

    async def open(self, ask: Ask) -> Exchange:
        """Checks, profiles and admits a request.

        Raises:
            ApiError: it is refused; nothing of it was published.
        """
        arrived_s = time.monotonic()
        model = UNRESOLVED
        self._opening += 1
        try:
            self._refuse_when_unable()
            body = parse_body(ask.endpoint, ask.body)
            view, profiled = await self._choose(ask, body, arrived_s)
            model = view.name
            exchange = self._submit(ask, body, view, profiled, arrived_s)
        except ApiError as error:
            self.metrics.ended(model, str(error.status), ask.way)
            raise
        finally:
            self._opening -= 1
        return exchange

    async def tokenized(self, name: str | None, size_bytes: int, work: Callable[[ModelTokenizer, m.ModelRecord], _T]) -> _T:
        """What ``work`` makes of the tokenizer of a model, without a word to the pool: no model wakes for it.

        ``work`` runs in a thread where ``size_bytes`` is large.

        Raises:
            ApiError: no such model, it brings no tokenizer, or ``work`` refuses.
        """
        arrived_s = time.monotonic()
        self._opening += 1
        try:
            self._refuse_when_unable()
            record = (await self._named(name or self._only_model(), arrived_s)).record
            tokenizer = await self._tokenizer_of(record)
            if not isinstance(tokenizer, ModelTokenizer):
                message = f"The model '{record.name}' brings no tokenizer; its operator can name one in 'spec.tokenizer'."
                raise ApiError(400, message, param="model", code="no_tokenizer")
            if size_bytes <= TOKENISED_INLINE_BYTES_MAX:
                return work(tokenizer, record)
            return await self._in_thread(partial(work, tokenizer, record))
        finally:
            self._opening -= 1

    def _only_model(self) -> str:
        known = [view.record.name for view in self._models.views()]
        if len(known) != 1:
            raise ApiError(400, "Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
        return known[0]

    def _refuse_when_unable(self) -> None:
        if self._draining:
            raise _shutting_down()
        if self._opening > OPENING_MAX:
            raise unavailable("Too many requests arrive at once. Please try again.", "overloaded")
        self._look_at_bus()
        if self._bus_lost_s is not None and time.monotonic() - self._bus_lost_s >= BUS_LOST_S_MAX:
            raise unavailable("The pool's message bus is not reachable. Please try again.", "bus_unavailable", 2)
        if not self._registry_read:
            raise unavailable("The gateway is starting. Please try again.", "starting")

    def _look_at_bus(self) -> None:
        if self._bus.connected:
            self._bus_lost_s = None
        elif self._bus_lost_s is None:
            self._bus_lost_s = time.monotonic()

    async def _choose(self, ask: Ask, body: ParsedBody, arrived_s: float) -> tuple[adm.ModelView, _Profiled]:
        """The model that answers, and the profile counted with its own tokenizer (ING-5, ING-6)."""
        model, adapter = body.asked.model, body.fields.adapter
        if model != adm.AUTO or adapter:
            view = await self._named(adapter or model, arrived_s)
            if adapter and model != adm.AUTO:
                base = await self._named(model, arrived_s)  # most name an adapter as the model; here it has its base (ING-3)
                view = self._models.adapter_of(base, adapter) or _raise(adm.unknown_model(adapter))
            elif adapter and view.adapter is None:
                message = f"'{view.name}' is a model and no adapter: name it in 'model'."
                raise ApiError(400, message, param="adapter", code="invalid_value")
            if (unable := adm.task_refusal(view.record, ask.endpoint)) is not None:
                raise _api_error(unable)
            if (refusal := adm.pool_refusal(view)) is not None:
                view = self._fallback_of(view) or _raise(refusal)
            return view, await self._profile(ask, body, view, arrived_s)
        wish = wish_of(ask, body)
        for view in adm.rank_models(wish, self._models.views()):
            try:
                return view, await self._profile(ask, body, view, arrived_s)
            except ApiError as error:
                if error.code not in ("context_length_exceeded", "tokenizer_broken"):
                    raise
        raise _api_error(adm.no_model_fits(wish))

    async def _named(self, name: str, arrived_s: float) -> adm.ModelView:
        view = self._models.resolve(name)
        while view is None and self._read_again_s < arrived_s:
            await self._read_again()
            view = self._models.resolve(name)
        return view or _raise(adm.unknown_model(name))

    def _fallback_of(self, view: adm.ModelView) -> adm.ModelView | None:
        """The model that a service degrades to, if it can be served now (ING-8)."""
        other = self._models.resolve(view.record.fallback)
        if other is None or other.record.name == view.record.name or adm.pool_refusal(other) is not None:
            return None
        return other if other.record.task is view.record.task else None

    async def _profile(self, ask: Ask, body: ParsedBody, view: adm.ModelView, arrived_s: float) -> _Profiled:
        record = view.record
        tokenizer = await self._tokenizer_of(record)
        count = partial(tokenizer.prompts, ask.endpoint, body.mapping)
        prompts = count() if len(body.raw) <= TOKENISED_INLINE_BYTES_MAX else await self._in_thread(count)
        if ask.endpoint is not m.Endpoint.EMBEDDINGS:
            input_tokens = max(len(prompt) for prompt in prompts)
            refusal = adm.context_refusal(record, input_tokens=input_tokens, max_tokens=body.asked.max_tokens)
            if refusal is not None:
                raise _api_error(refusal)
        now_s = time.monotonic()
        context = RequestContext(
            tenant=ask.tenant,
            trust_domain=self._options.trust_domains.get(ask.tenant, ""),
            deadline_unix_s=time.time() + self._deadline_s(ask, arrived_s) - now_s,
            sla_class=ask.sla_class,
            business_id=header(ask, "x-business-id"),
            chain_id=header(ask, "x-chain-id"),
            environment=header(ask, "x-environment") or "production",
            kind=request_kind(ask),
            adapter=view.adapter,
        )
        profile, chain = profile_and_chain(record, ask.endpoint, body.asked, prompts, context, self._lengths)
        # KV of embeddings is not kept either, so their prompts are not looked for.
        kept = record.kv_reuse and ask.endpoint is not m.Endpoint.EMBEDDINGS
        hashes = chain.hashes if kept and not self.prefixes.empty else []
        salt = engine_salt(chain.salt, kept=record.kv_reuse)
        costs = self._reuse_costs(record, view.pool.costs if view.pool is not None else None)
        return _Profiled(profile, salt, prompt_prefix(hashes, record, costs))

    def _reuse_costs(self, record: m.ModelRecord, step: m.StepCosts | None) -> ReuseCosts:
        known = self._reuse.get(record.name)
        if known is None or known[0] is not record or known[1].step != (step or COSTS_DEFAULT):
            if len(self._reuse) >= REUSE_COSTS_MAX:
                self._reuse.clear()
            known = self._reuse[record.name] = record, reuse_costs(record, step)
            if (spans := engine_spans(record)) is not None:
                self.prefixes.engine_is(record.model_hash, spans)
        return known[1]

    async def _tokenizer_of(self, record: m.ModelRecord) -> PromptTokenizer:
        loaded = self._models.loaded_tokenizer(record)
        return await self._in_thread(partial(self._models.load_tokenizer, record)) if loaded is None else loaded

    async def _in_thread(self, work: partial[_T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _deadline_s(self, ask: Ask, arrived_s: float) -> float:
        timeout_s = timeout_s_of(ask)
        longest_s = self._options.request_s_max
        return arrived_s + (longest_s if timeout_s is None else min(timeout_s, longest_s))

    def _submit(self, ask: Ask, body: ParsedBody, view: adm.ModelView, profiled: _Profiled, arrived_s: float) -> Exchange:
        profile, salt, prefix = profiled
        request = RequestId(f"{self.ingress}-{next(self._numbers)}")
        # The name the client used, alias or not; for ``auto`` and a degradation, the model that answers (PAINS J12).
        asked = body.asked
        own_name = view.is_called(asked.model)
        name = asked.model if own_name else view.name
        head = AnswerHead(request, ask.endpoint, name, int(time.time()), profile.n, asked.include_usage)
        stream = asked.stream if ask.stream is None else ask.stream and ask.endpoint is not m.Endpoint.EMBEDDINGS
        if stream is not profile.stream:
            profile = msgspec.structs.replace(profile, stream=stream)
        leave = partial(self._client_left, request)
        degraded_from = "" if own_name or asked.model == adm.AUTO else asked.model
        exchange = Exchange(request, head, view.name, stream, profile.input_tokens, leave, degraded_from)
        deadline_s = self._deadline_s(ask, arrived_s)
        wait_until_s = min(deadline_s, arrived_s + view.record.max_wait_s)
        live = _Live(exchange, ask, body, view, profile, salt, prefix, arrived_s, wait_until_s, deadline_s)
        self._admit(request, live)
        return exchange

    def _admit(self, request: RequestId, live: _Live) -> None:
        refusal = self._admission.admit(request, live.ask.tenant, live.profile.sla_class, live.view)
        if refusal is not None:
            raise _api_error(refusal)
        self._live[request] = live
        arrived_unix_s = time.time() - (time.monotonic() - live.arrived_s)
        self._recent.arrived(request, live.view.name, live.profile, live.arrived_s, arrived_unix_s)
        self._shell.step(
            ev.RequestSubmitted(
                request=request,
                profile=live.profile,
                body=live.body.raw,
                wait_until_s=live.wait_until_s,
                deadline_s=live.deadline_s,
                cache_salt=live.salt,
                yields_at_s=adm.yields_at_s(live.view.record, live.profile.input_tokens, live.arrived_s),
                sla=live.view.record.sla,
                adapter=live.view.adapter,
                options=parses_with(live.view.record.engine_options),
                prefix=live.prefix,
            )
        )
        view = live.view
        if view.replicas_ready == 0 and self._admission.waiting(view.record.deployment, live.profile.sla_class) == 1:
            self._telemetry_now.set()

    def _client_left(self, request: RequestId) -> None:
        if (live := self._live.get(request)) is not None:
            self.metrics.of(live.view.name).cancelled.inc()
            self._shell.step(ev.ClientLeft(request))

    # ------------------------------------------------------------------------------------------- what the core reports

    def granted(self, grant: ev.RecordGrant) -> None:
        """A replica has the request."""
        if (live := self._live.get(grant.request)) is None:
            return
        self._admission.started(grant.request)
        self._recent.granted(grant.request, grant.attempt, grant.replica, grant.waited_s, prefix_tokens=grant.prefix_tokens)
        live.granted = True
        live.waited_s = grant.waited_s
        exchange = live.exchange
        exchange.prefix_tokens = grant.prefix_tokens
        if grant.prefix_tokens:
            metrics = self.metrics.of(live.view.name)
            metrics.prefix_requests.inc()
            metrics.prefix_tokens.inc(grant.prefix_tokens)
        exchange.replica, exchange.attempt = grant.replica, grant.attempt
        exchange.queue_wait_s = time.monotonic() - live.arrived_s

    def delivered(self, deliver: ev.Deliver) -> None:
        """The next output of a request."""
        if (live := self._live.get(deliver.request)) is None:
            return
        if live.first_output_s is None:
            live.first_output_s = time.monotonic()
            self.metrics.of(live.view.name).queue_wait_s.observe(live.waited_s)
            self._recent.first_output(deliver.request, live.first_output_s)
            self.metrics.of(live.view.name).ttft_s.observe(live.first_output_s - live.arrived_s)
        if deliver.delta.finish_reason is not None:
            live.finish_reasons.append(deliver.delta.finish_reason)
        if not live.exchange.push((deliver.delta,)):
            live.exchange.drop_buffered()
            error = unavailable("The client reads too slowly; the answer was given up.", "slow_client", None)
            live.exchange.close(Failed(error))
            self._shell.step(ev.ClientLeft(deliver.request))

    def restarted(self, restart: ev.RecordRestart) -> None:
        """The request lost its replica and waits again."""
        if (live := self._live.get(restart.request)) is None:
            return
        live.granted = False
        self._admission.requeued(restart.request)
        self._recent.restarted(restart.request, begun=not restart.handed)
        if restart.handed:
            return
        self.metrics.of(live.view.name).attempts.inc()
        # Not the reason: it may be an engine's error, which may quote the prompt.
        log.info("a request waits again", request=restart.request, attempt=restart.attempt, lost=live.exchange.replica)

    def ended(self, end: ev.EndRequest) -> None:
        """The request has ended."""
        self._admission.ended(end.request)
        usage = end.outcome.usage if isinstance(end.outcome, ev.Finished) else None
        failed = _CLIENT_LEFT if isinstance(end.outcome, ev.Cancelled) else end.outcome
        status, code = (200, "") if isinstance(failed, ev.Finished) else (failed.status, failed.code or "")
        tokens = usage.completion_tokens if usage is not None else None
        self._recent.ended(end.request, time.monotonic(), status=status, code=code, output_tokens=tokens)
        if (live := self._live.pop(end.request, None)) is None:
            return
        if isinstance(failed, ev.Finished):
            self._count_end(live, "200")
            self._learn(live, usage)
            live.exchange.close(Ended(usage))
        elif not self._degrade(live, failed):
            if status >= 500:
                # Not the message: an engine's may quote the prompt.
                about = {"model": live.view.name, "status": status, "code": failed.code}
                log.info("a request failed", request=end.request, **about)
            self._count_end(live, str(status))
            live.exchange.close(Failed(_api_error(failed)))
        if not self._live:
            self._idle.set()

    def discarded(self, kind: str) -> None:
        """A message could not be decoded and was dropped (PAINS O2)."""
        self.metrics.discarded.labels(kind).inc()

    def broke(self, error: BaseException) -> None:
        """A part that must run as long as the gateway has ended."""
        log.error("a part of the gateway failed", error=place_of(error))
        if not self.broken.done():
            self.broken.set_result(None)

    def _count_end(self, live: _Live, status: str) -> None:
        name = live.view.name
        self.metrics.ended(name, status, live.ask.way)
        self.metrics.of(name).latency_s.observe(time.monotonic() - live.arrived_s)

    def _learn(self, live: _Live, usage: m.Usage | None) -> None:
        if usage is None:
            return
        profile = live.profile
        metrics = self.metrics.of(live.view.name)
        metrics.tokens_input.inc(usage.prompt_tokens)
        metrics.tokens_output.inc(usage.completion_tokens)
        metrics.tokens_cached.inc(usage.cached_tokens)
        if live.finish_reasons and all(reason != "length" for reason in live.finish_reasons):
            self._lengths.observe(profile.model_hash, profile.tenant, profile.kind, usage.completion_tokens // profile.n)

    def _degrade(self, live: _Live, failed: CoreFailed) -> bool:
        """Waited in vain: ask the fallback model instead of failing, and say so (ING-8)."""
        waited_in_vain = failed.status == 503 and not live.granted and time.monotonic() >= live.wait_until_s
        if not waited_in_vain or live.exchange.degraded_from or live.exchange.left or self._draining:
            return False
        if (other := self._fallback_of(live.view)) is None:
            return False
        self._resubmits.spawn(self._resubmit(live, other, failed))
        return True

    async def _resubmit(self, live: _Live, other: adm.ModelView, failed: CoreFailed) -> None:
        """Belongs to no core while it runs, so every way out of it but an admission ends the exchange."""
        now_s = time.monotonic()
        exchange = live.exchange
        admitted = False
        try:
            profile, salt, prefix = await self._profile(live.ask, live.body, other, live.arrived_s)
            if exchange.left or self._draining:
                return
            request = RequestId(f"{self.ingress}-{next(self._numbers)}")
            exchange.degrade(other.name, live.view.name, partial(self._client_left, request))
            wait_until_s = min(live.deadline_s, now_s + other.record.max_wait_s)
            again = _Live(
                *(exchange, live.ask, live.body, other, profile, salt, prefix), live.arrived_s, wait_until_s, live.deadline_s
            )
            self._admit(request, again)
            admitted = True
        except ApiError:
            pass  # The client hears why its own model did not answer.
        except Exception as error:
            log.error("a request could not be given to its fallback", error=place_of(error))
        finally:
            if not admitted:
                self._count_end(live, "499" if exchange.left else str(failed.status))
                exchange.close(Failed(_api_error(failed)))

    # -------------------------------------------------------------------------------------------- registry and digest

    def _on_record(self, key: str, entry: KvEntry | None) -> None:
        self._registry_changes += 1
        self._models.record_changed(key, entry)

    def _on_question(self, message: BusMessage) -> None:
        if message.reply:
            self._questions.spawn(self._tell(message.reply, RequestId(message.payload[:128].decode(errors="replace"))))

    async def _tell(self, reply: str, request: RequestId) -> None:
        with suppress(BusError):
            await self._bus.publish(reply, encode(self._recent.story(request, time.monotonic())))

    def _on_digest(self, message: BusMessage) -> None:
        self._take_digest(message.payload)

    def _take_digest(self, payload: bytes) -> None:
        try:
            digest = decode(payload, m.PoolDigest)
        except DecodeError:
            self.discarded("pool")
            return
        self.digest = digest
        self._models.digest_changed(digest)
        self.prefixes.pool_is(digest)
        self._shell.step(ev.PoolChanged(digest))

    async def _send_telemetry(self) -> None:
        """Every 100 ms, and at once when somebody starts to wait for a model without replicas: that wakes a cold one."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._telemetry_now.wait(), TELEMETRY_EVERY_S)
            self._telemetry_now.clear()
            self._look_at_bus()
            if not self._bus.connected:
                continue
            self._telemetry_sequence += 1
            telemetry = m.IngressTelemetry(
                ingress=self.ingress, sequence=self._telemetry_sequence, demand=self._shell.take_demand()
            )
            try:
                await self._bus.publish(names.ingress_telemetry(self.ingress), encode(telemetry))
            except BusError as error:
                log.debug("telemetry was not sent", error=str(error))


# --------------------------------------------------------------------------------------------------------------- helpers


def _raise(refusal: adm.Refused) -> NoReturn:
    raise _api_error(refusal)


def _api_error(told: adm.Refused | CoreFailed) -> ApiError:
    retry_after_s = 1 if told.retry_after_s is None and told.status in (429, 503) else told.retry_after_s
    return ApiError(told.status, told.message, type=told.type, param=told.param, code=told.code, retry_after_s=retry_after_s)


def _shutting_down() -> ApiError:
    return unavailable("The gateway is shutting down. Please try again.", "shutting_down")
