"""OpenAI semantics by vLLM's own layers: render (body to token ids and parameters) and derender (ids to deltas).

Shared by both vLLM engines; how tokens are generated in between is theirs. vLLM's serving objects are used without their
engine and without HTTP, so that chat templates, tools, reasoning, log probabilities and parameter checks are exactly those
of ``vllm serve``. Importing this module imports vLLM: call :func:`workers.engines.vllm_process.prepare_process` first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from tokenizers.decoders import DecodeStream
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionResponseStreamChoice,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.inputs import tokens_input
from vllm.model_executor.models import ModelRegistry
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams

from profiles.costs import chunk_tokens
from profiles.deployment import PARSING_OPTIONS, parses_with, runs_with
from profiles.hashing import canonical_json
from profiles.tokenizer import DEFAULT_CHAT_TEMPLATE
from subjects import messages as m
from subjects.errors import EngineError
from workers.engines.base import EngineRequest
from workers.engines.vllm_refusals import Refused, bad_request, check_extras, failure_of, refusal

PROBE_TEXT = "Hello"

GREEDY_BELOW = 1e-5
"""Temperature under which vLLM samples greedily."""
TOOL_STRICT_LEVEL = "parameter"
"""Forced arguments follow each tool's schema. Under vLLM's own ``auto`` they do so only for a tool that says ``strict``: for
others ``required`` lets any JSON through, and small models answer with a bare string or null where an object is due."""
WITHHELD_ARGUMENTS = ("kv_transfer_params", "ec_transfer_params")
_LAYER_OPTIONS = ("chat_template", *PARSING_OPTIONS)


def engine_arguments(record: m.ModelRecord, chunk: int | None = None) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs`` for ``record``. KV gets exactly ``record.kv_bytes``, shared by the
    devices that it spans.

    ``chunk`` is how many prompt tokens one step takes where the record has no costs; None leaves that to vLLM. Every other
    key of ``record.engine_options`` is passed on; those of the OpenAI layer are taken out.
    """
    options = {name: value for name, value in record.engine_options.items() if name not in _LAYER_OPTIONS}
    if record.costs:
        chunk = min(chunk_tokens(costs, record.sla.tpot_ms / 1000) for costs in record.costs.values())
    elif record.task is m.Task.EMBED:
        chunk = None
    if chunk is not None:
        options = {"max_num_batched_tokens": max(chunk, record.max_num_seqs), **options}
    return {
        "model": record.source,
        "served_model_name": record.name,
        "dtype": record.dtype,
        "max_model_len": record.max_context_len,
        "block_size": record.block_size,
        "max_num_seqs": record.max_num_seqs,
        "kv_cache_memory_bytes": record.kv_bytes // record.gpus,
        "tensor_parallel_size": record.gpus,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
        **({"runner": "pooling"} if record.task is m.Task.EMBED else {}),
        **options,
    }


def register_architecture(source: str) -> None:
    """Imports the model's class here, since vLLM would otherwise start a second process (10 s) just to look at it.

    Only where no accelerator can be touched by the import, that is on CPU.
    """
    try:
        names = json.loads((Path(source) / "config.json").read_bytes()).get("architectures") or []
    except (OSError, ValueError) as error:
        raise EngineError(f"{source}: config.json cannot be read: {error}") from None
    for name in names:
        known = ModelRegistry.models.get(name)
        if known is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request, ready for vLLM: ``engine_input`` holds the token ids, tokens already sent included."""

    engine_input: Any
    params: Any
    prompt_tokens: int
    new_tokens_max: int
    """Zero when a continuation has no tokens left to generate."""
    rendered_ids: tuple[int, ...] = ()
    """Without the tokens already sent; set only for a continuation."""


class Rendered(msgspec.Struct, frozen=True):
    """A request after rendering. ``body`` is vLLM's own request object; choices number prompt by prompt."""

    request: EngineRequest
    body: Any
    prompts: tuple[Prompt, ...]
    choices_per_prompt: int
    echo_text: tuple[str, ...] = ()
    template_arguments: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def scores_only(self) -> bool:
        """Whether a completion asks for no token: an echo of its prompt, with the prompt's log probabilities."""
        return self.request.endpoint is m.Endpoint.COMPLETIONS and vars(self.body)["max_tokens"] == 0

    @property
    def exhausted(self) -> bool:
        """Whether this is a continuation whose tokens were all sent already."""
        return bool(self.request.sent_token_ids) and self.prompts[0].new_tokens_max == 0


class OpenAiLayer:
    """Render and derender for one started model, with the parsers of one of its names; :meth:`render` finds those of the
    name that a request is for.

    Options of the record: ``chat_template`` and vLLM's ``tool_call_parser``, ``tool_strict_level`` (``auto``, ``function``;
    absent: ``parameter``) and ``reasoning_parser``.

    Raises:
        EngineError: a parser that vLLM does not know, or that does not fit the model's tokenizer.
    """

    def __init__(self, record: m.ModelRecord, vllm_config: Any, renderer: Any, input_processor: Any) -> None:
        model_config = vllm_config.model_config
        tokenizer = renderer.get_tokenizer()
        template = record.engine_options.get("chat_template") or None
        if template is None and not getattr(tokenizer, "chat_template", None):
            template = DEFAULT_CHAT_TEMPLATE
        tool_parser = record.engine_options.get("tool_call_parser") or None
        self.model_config = model_config
        self.tokenizer = tokenizer
        self._parses = parses_with(record.engine_options)
        self._others: dict[str, OpenAiLayer] = {}

        def with_parsers(options: Mapping[str, str | int | float | bool]) -> OpenAiLayer:
            changed = msgspec.structs.replace(record, engine_options=runs_with(record.engine_options) | dict(options))
            return OpenAiLayer(changed, vllm_config, renderer, input_processor)

        self._with_parsers = with_parsers
        tools = {
            "enable_auto_tools": tool_parser is not None,
            "tool_parser": tool_parser,
            "tool_strict_level": str(record.engine_options.get("tool_strict_level") or TOOL_STRICT_LEVEL),
            "reasoning_parser": record.engine_options.get("reasoning_parser") or "",
        }
        layer: dict[str, Any] = {"chat_template": template, "chat_template_content_format": "auto", **tools}
        client = SimpleNamespace(
            model_config=model_config, renderer=renderer, input_processor=input_processor, vllm_config=vllm_config
        )
        try:
            self.online_renderer = OnlineRenderer(model_config, renderer, request_logger=None, **layer)
            self.chat = OpenAIServingChat(
                client, None, "assistant", online_renderer=self.online_renderer, request_logger=None, **layer
            )
        except (TypeError, ValueError) as error:
            raise EngineError(f"{record.name}: a parser named in 'spec.engine.options' cannot be used: {error}") from None
        self.completion = OpenAIServingCompletion(client, None, online_renderer=self.online_renderer, request_logger=None)

    async def render(self, request: EngineRequest) -> Answer:
        """Body to prompts, and the answer to them that is to be filled. Tokenising runs on vLLM's own thread.

        Raises:
            Refused: the body or its parameters are not acceptable.
        """
        if request.endpoint is m.Endpoint.EMBEDDINGS:
            raise Refused(bad_request("this engine makes no embeddings", "model"))
        layer = self._parsing(request)
        chat = request.endpoint is m.Endpoint.CHAT
        try:
            return Answer(layer, await (layer._render_chat if chat else layer._render_completion)(request))
        except Refused:
            raise
        except Exception as error:
            raise Refused(refusal(error, request)) from None

    def _parsing(self, request: EngineRequest) -> OpenAiLayer:
        """The layer with the parsers that this request's name has; the names that share a replica are few."""
        if request.options is None or request.options == self._parses:
            return self
        key = canonical_json(request.options)
        try:
            if key not in self._others:
                self._others[key] = self._with_parsers(request.options)
            return self._others[key]
        except EngineError as error:
            raise Refused(m.Failure(kind=m.FailureKind.BAD_REQUEST, message=str(error), status=500)) from None

    async def _render_chat(self, request: EngineRequest) -> Rendered:
        body = ChatCompletionRequest.model_validate_json(request.body)
        for tool in body.tools or ():
            function = getattr(tool, "function", None)
            if function is not None and not function.parameters:
                # At OpenAI this is a function without parameters. vLLM would take any JSON for its arguments, null too.
                function.parameters = {"type": "object", "properties": {}}
        _check_body(body, request)
        result = await self.online_renderer.render_chat(body)
        if isinstance(result, ErrorResponse):
            raise Refused(failure_of(result, request))
        conversation, engine_inputs = result
        # max_tokens is deprecated for chats, and says so in a warning when it is read as an attribute.
        limit = vars(body)["max_completion_tokens"]
        limit = vars(body)["max_tokens"] if limit is None else limit
        echo = ""
        if body.echo and conversation and conversation[-1].get("role") == self.chat.get_chat_request_role(body):
            echo = _plain_text(conversation[-1].get("content"))
        return Rendered(
            request=request,
            body=body,
            prompts=tuple(self._prompt(request, body, self.chat, each, limit) for each in engine_inputs),
            choices_per_prompt=body.n or 1,
            echo_text=(echo,) * len(engine_inputs) if echo else (),
            template_arguments=self.chat._effective_chat_template_kwargs(body),
        )

    async def _render_completion(self, request: EngineRequest) -> Rendered:
        body = CompletionRequest.model_validate_json(request.body)
        _check_body(body, request)
        result = await self.online_renderer.render_completion(body)
        if isinstance(result, ErrorResponse):
            raise Refused(failure_of(result, request))
        return Rendered(
            request=request,
            body=body,
            prompts=tuple(self._prompt(request, body, self.completion, each, body.max_tokens) for each in result),
            choices_per_prompt=body.n or 1,
            echo_text=tuple(each.get("prompt") or "" for each in result) if body.echo else (),
        )

    def _prompt(self, request: EngineRequest, body: Any, serving: Any, engine_input: Any, limit: int | None) -> Prompt:
        rendered_ids = engine_input["prompt_token_ids"]
        tokens = get_max_tokens(
            self.model_config.max_model_len,
            limit,
            len(rendered_ids),
            serving.default_sampling_params,
            serving.override_max_tokens,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )
        if request.max_tokens > 0:
            tokens = min(tokens, request.max_tokens)
        sent = request.sent_token_ids
        if sent:
            tokens -= len(sent)
        # A continuation without tokens left never reaches the engine, but vLLM refuses parameters for zero tokens.
        params = body.to_sampling_params(max(tokens, 1) if sent else tokens, serving.default_sampling_params)
        params.output_kind = RequestOutputKind.DELTA
        params.stream_interval = None
        for name in WITHHELD_ARGUMENTS:
            # A client's own, by way of ``vllm_xargs``; vLLM would take them for ours.
            (params.extra_args or {}).pop(name, None)
        if sent:
            _check_continuation(body, params)
        return Prompt(
            engine_input={
                **engine_input,
                "prompt_token_ids": [*rendered_ids, *sent],
                **({"cache_salt": request.cache_salt} if request.cache_salt else {}),
            },
            params=params,
            prompt_tokens=len(rendered_ids),
            new_tokens_max=max(tokens, 0),
            rendered_ids=tuple(rendered_ids) if sent else (),
        )

    def parsers(self, rendered: Rendered) -> list[Any]:
        """One stateful tool and reasoning parser per choice; none where the model has no parser."""
        choices = len(rendered.prompts) * rendered.choices_per_prompt
        if rendered.request.endpoint is not m.Endpoint.CHAT or self.chat.parser_cls is None:
            return [None] * choices
        return [self.chat._make_parser(rendered.body, self.tokenizer, rendered.template_arguments) for _ in range(choices)]


class Answer:
    """Derenders one request: vLLM's outputs in, deltas out. Used from one thread at a time."""

    def __init__(self, layer: OpenAiLayer, rendered: Rendered) -> None:
        self.rendered = rendered
        self.ended = False
        self._layer = layer
        self._chat = rendered.request.endpoint is m.Endpoint.CHAT
        self._parsers = layer.parsers(rendered)
        choices = len(self._parsers)
        sent = len(rendered.request.sent_token_ids)
        self._next_index = [sent] * choices
        self._finished = [False] * choices
        self._echoed = [not rendered.echo_text] * choices
        self._tools_streamed = [False] * choices
        self._text_offset = [0] * choices
        self._cached: dict[int, int] = {}

    def take(self, prompt_index: int, output: Any) -> list[m.Delta]:
        """Deltas of one vLLM ``RequestOutput`` in delta form, for the prompt with this index."""
        if self.ended:
            return []
        try:
            return self._take(prompt_index, output)
        except Exception as error:
            # A parser that stumbles over what the model said ends this request, not the engine.
            return [self.fail(m.Failure(kind=m.FailureKind.SICK, message=f"derendering failed: {type(error).__name__}"))]

    def _take(self, prompt_index: int, output: Any) -> list[m.Delta]:
        self._cached.setdefault(prompt_index, output.num_cached_tokens or 0)
        deltas: list[m.Delta] = []
        for part in output.outputs:
            choice = part.index + prompt_index * self.rendered.choices_per_prompt
            if self._finished[choice]:
                continue
            if part.finish_reason in ("error", "abort"):
                return [*deltas, self.fail(self._generation_failure())]
            delta = self._delta(choice, prompt_index, output, part)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def fail(self, failure: m.Failure) -> m.Delta:
        """The delta that ends the request with ``failure``."""
        self.ended = True
        request = self.rendered.request
        return m.Delta(
            request=request.request,
            attempt=request.attempt,
            first_token_index=self._next_index[0],
            units=0,
            end=True,
            failure=failure,
        )

    def finish_exhausted(self) -> m.Delta:
        """The delta that ends a continuation whose tokens were all sent already."""
        self.ended = True
        self._finished = [True] * len(self._finished)
        request = self.rendered.request
        return m.Delta(
            request=request.request,
            attempt=request.attempt,
            first_token_index=self._next_index[0],
            units=0,
            finish_reason="length",
            end=True,
            usage=self._usage(),
        )

    def _delta(self, choice: int, prompt_index: int, output: Any, part: Any) -> m.Delta | None:
        rendered = self.rendered
        token_ids = tuple(part.token_ids)
        text: str = part.text
        if not (token_ids or text or part.finish_reason):
            return None
        detail: dict[str, Any] = {}
        finish_reason: str | None = part.finish_reason
        if self._chat:
            text, finish_reason = self._chat_delta(choice, output, part, detail)
        elif rendered.scores_only:
            token_ids, text = (), ""  # vLLM generates one token, which nobody asked for.
        if not self._chat and rendered.body.logprobs is not None and part.logprobs is not None:
            detail["logprobs"] = self._completion_logprobs(choice, prompt_index, output, part)
        if not self._echoed[choice]:
            self._echoed[choice] = True
            text = rendered.echo_text[prompt_index] + text
        if finish_reason == "repetition":
            finish_reason = "stop"  # OpenAI's clients know no such reason; the client's own parameter asked for this end.
        first_token_index = self._next_index[choice]
        self._next_index[choice] += len(token_ids)
        if finish_reason is not None:
            self._finished[choice] = True
        self.ended = all(self._finished)
        return m.Delta(
            request=rendered.request.request,
            attempt=rendered.request.attempt,
            choice=choice,
            first_token_index=first_token_index,
            units=len(token_ids),
            text=text,
            token_ids=token_ids,
            detail=json.dumps(detail, ensure_ascii=False, allow_nan=False).encode() if detail else b"",
            finish_reason=finish_reason,
            stop_reason=part.stop_reason,
            end=self.ended,
            usage=self._usage() if self.ended else None,
        )

    def _chat_delta(self, choice: int, output: Any, part: Any, detail: dict[str, Any]) -> tuple[str, str | None]:
        body, parser, chat = self.rendered.body, self._parsers[choice], self._layer.chat
        hidden = parser is not None and not body.include_reasoning
        if body.logprobs and part.logprobs is not None and not hidden:
            detail["logprobs"] = chat._create_chat_logprobs(
                token_ids=part.token_ids,
                top_logprobs=part.logprobs,
                tokenizer=self._layer.tokenizer,
                num_output_top_logprobs=body.top_logprobs,
                logprob_token_ids=body.logprob_token_ids,
                return_as_token_id=body.return_tokens_as_token_ids,
            ).model_dump(mode="json")
        if parser is None:
            return part.text, part.finish_reason
        message = parser.parse_delta(
            delta_text=part.text,
            delta_token_ids=list(part.token_ids),
            request=body,
            prompt_token_ids=output.prompt_token_ids,
            finished=part.finish_reason is not None,
        )
        text = ""
        if message is not None:
            if message.tool_calls:
                self._tools_streamed[choice] = True
                for call in message.tool_calls:
                    if call.function is not None and call.function.name and call.function.arguments is None:
                        call.function.arguments = ""  # As at OpenAI: the piece with the name has arguments too.
                message = maybe_filter_parallel_tool_calls(
                    ChatCompletionResponseStreamChoice(index=choice, delta=message), body
                ).delta
            rest = message.model_dump(mode="json", exclude_unset=True, exclude_none=True)
            text = rest.pop("content", None) or ""
            rest.pop("role", None)
            if not rest.get("tool_calls"):
                rest.pop("tool_calls", None)
            detail.update(rest)
        finish_reason = part.finish_reason
        named = isinstance(body.tool_choice, ChatCompletionNamedToolChoiceParam)
        if self._tools_streamed[choice] and not named and finish_reason == "stop":
            finish_reason = "tool_calls"
        return text, finish_reason

    def _completion_logprobs(self, choice: int, prompt_index: int, output: Any, part: Any) -> dict[str, Any]:
        body = self.rendered.body
        token_ids, logprobs = ([], []) if self.rendered.scores_only else (list(part.token_ids), list(part.logprobs))
        if not self._echoed[choice] and output.prompt_logprobs is not None:
            token_ids = [*output.prompt_token_ids, *token_ids]
            logprobs = [*output.prompt_logprobs, *logprobs]
        result = self._layer.completion._create_completion_logprobs(
            token_ids=token_ids,
            top_logprobs=logprobs,
            num_output_top_logprobs=body.logprobs,
            tokenizer=self._layer.tokenizer,
            logprob_token_ids=body.logprob_token_ids,
            initial_text_offset=self._text_offset[choice],
            return_as_token_id=body.return_tokens_as_token_ids,
        )
        if result.tokens:
            self._text_offset[choice] = result.text_offset[-1] + len(result.tokens[-1])
        dumped: dict[str, Any] = result.model_dump(mode="json")
        return dumped

    def _usage(self) -> m.Usage:
        prompt_tokens = sum(prompt.prompt_tokens for prompt in self.rendered.prompts)
        return m.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=sum(self._next_index),
            cached_tokens=min(sum(self._cached.values()), prompt_tokens),
        )

    def _generation_failure(self) -> m.Failure:
        body = self.rendered.body
        if body.extract_structured_outputs() is not None:
            # vLLM checks a schema when it arrives and compiles it later; what fails then is still the schema's fault.
            return m.Failure(
                kind=m.FailureKind.BAD_REQUEST,
                message="the requested output structure cannot be compiled for this model",
                status=400,
                param="response_format",
            )
        return m.Failure(kind=m.FailureKind.SICK, message="the engine failed while generating", status=500)


def prime_continuation(detokenizer: Any, rendered_ids: Sequence[int], sent: Sequence[int]) -> None:
    """Puts the detokenizer of a continuation where it would be had it decoded the sent tokens itself.

    vLLM starts one from the whole prompt, which gives a wrong first text when the sent tokens end within a character, and
    forgets what a stop string may have begun with. Only for vLLM's fast detokenizer.
    """
    detokenizer.stream = DecodeStream(ids=list(rendered_ids), skip_special_tokens=detokenizer.skip_special_tokens)
    detokenizer.update(list(sent), False)
    detokenizer.get_next_output_text(finished=False, delta=True)


def probe_parameters(tokens: int) -> Any:
    """Greedy sampling of ``tokens`` tokens with the log probability of each, in one output at the end."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def probe_prompt(tokenizer: Any) -> Any:
    """The golden probe's prompt."""
    return tokens_input(tokenizer.encode(PROBE_TEXT) or [0])


def probed_tokens(output: Any) -> list[int]:
    """The token ids that a probe gave.

    Raises:
        EngineError: none, or with probabilities that are not finite numbers.
    """
    part = output.outputs[0]
    token_ids = list(part.token_ids)
    chosen = [step[token].logprob for token, step in zip(token_ids, part.logprobs or (), strict=False)]
    if not token_ids or len(chosen) != len(token_ids) or not all(math.isfinite(each) for each in chosen):
        raise EngineError("the golden probe gave no tokens or no finite probabilities; the engine is not sane")
    return token_ids


def refused(request: EngineRequest, failure: m.Failure) -> m.Delta:
    """The one delta of a request that never ran."""
    return m.Delta(
        request=request.request,
        attempt=request.attempt,
        first_token_index=len(request.sent_token_ids),
        units=0,
        end=True,
        failure=failure,
    )


def job_name(request: EngineRequest, prompt_index: int) -> str:
    """What vLLM calls one prompt of a request; it adds random characters of its own."""
    return f"{request.request}.{request.attempt}.{prompt_index}"


def _check_body(body: Any, request: EngineRequest) -> None:
    # Whose cached prefixes a request may use is the gateway's to say, never the client's.
    body.kv_transfer_params = body.ec_transfer_params = body.cache_salt = None
    check_extras(body)
    wanted = getattr(body.response_format, "json_schema", None)
    if wanted is not None and wanted.json_schema is None:
        raise Refused(bad_request("'json_schema' must hold a 'schema'", "response_format"))
    if (body.n or 1) > 1 and body.temperature is not None and body.temperature < GREEDY_BELOW:
        # vLLM's greedy sampling gives one choice. The likeliest token is drawn from itself alone instead.
        body.temperature, body.top_k = 1.0, 1
    if request.sent_token_ids and (body.n or 1) != 1:
        raise Refused(bad_request("a request for several choices cannot be continued", "n"))


def _check_continuation(body: Any, params: Any) -> None:
    # These depend on what was generated before, which looks like prompt to a continuing engine. The gateway knows too.
    wrong = {
        "seed": params.seed is not None,
        "min_tokens": params.min_tokens > 0,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "repetition_penalty": params.repetition_penalty != 1,
        "response_format": params.structured_outputs is not None,
        "echo": bool(body.echo),
    }
    for name, present in wrong.items():
        if present:
            raise Refused(bad_request(f"a request with {name} cannot be continued", name))


def _plain_text(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content or ""
