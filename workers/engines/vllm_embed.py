"""Embeddings by vLLM's own layers: its request object, renderer and pooling parameters, without its HTTP.

What :mod:`workers.engines.vllm_openai` is for text. Importing this module imports vLLM.
"""

from __future__ import annotations

import math
from typing import Any

from vllm import PoolingParams
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.renderers.online_renderer import OnlineRenderer

from subjects.errors import EngineError
from subjects.messages import Delta, Endpoint, Failure, FailureKind, Usage
from workers.core.embeddings import EncodingFormat, embedding_deltas, write_vector
from workers.engines.base import EngineRequest
from workers.engines.vllm_openai import Prompt, Rendered, refused
from workers.engines.vllm_refusals import Refused, refusal


class EmbeddingLayer:
    """Render and derender for one started embedding model."""

    def __init__(self, vllm_config: Any, renderer: Any) -> None:
        self._model_config = vllm_config.model_config
        self._online_renderer = OnlineRenderer(
            self._model_config, renderer, request_logger=None, chat_template=None, chat_template_content_format="auto"
        )

    async def render(self, request: EngineRequest) -> EmbeddingAnswer:
        """Body to prompts, one for each input, and the answer to them that is to be filled.

        Raises:
            Refused: the body or its parameters are not acceptable.
        """
        try:
            if request.endpoint is not Endpoint.EMBEDDINGS:
                raise Refused(_bad("this engine makes embeddings only", "model"))
            body = EmbeddingCompletionRequest.model_validate_json(request.body)
            if body.encoding_format not in ("float", "base64") or body.embed_dtype != "float32" or body.endianness == "big":
                raise Refused(_bad("only float and base64 of little-endian float32 are offered", "encoding_format"))
            body.cache_salt = request.cache_salt or None
            inputs = await self._online_renderer.preprocess_completion(body, body.input, None)
            prompts = []
            for engine_input in inputs:
                params = body.to_pooling_params()
                params.verify(self._model_config)
                tokens = len(engine_input["prompt_token_ids"])
                prompts.append(Prompt(engine_input, params, prompt_tokens=tokens, new_tokens_max=0))
            rendered = Rendered(request=request, body=body, prompts=tuple(prompts), choices_per_prompt=1)
            return EmbeddingAnswer(rendered, body.encoding_format)
        except Refused:
            raise
        except Exception as error:
            raise Refused(refusal(error, request)) from None


class EmbeddingAnswer:
    """Gathers the vectors of one request; its deltas come all at once, with the last one. Used from one thread at a time."""

    def __init__(self, rendered: Rendered, encoding: EncodingFormat) -> None:
        self.rendered = rendered
        self.ended = False
        self._encoding = encoding
        self._vectors: dict[int, bytes] = {}
        self._cached_tokens = 0

    def take(self, prompt_index: int, output: Any) -> list[Delta]:
        """Deltas of one vLLM ``PoolingRequestOutput``, for the input with this index."""
        if self.ended or prompt_index in self._vectors:
            return []
        if getattr(output, "error", None) is not None:
            return [self.fail(Failure(kind=FailureKind.SICK, message="the engine failed while embedding", status=500))]
        self._vectors[prompt_index] = write_vector(output.outputs.data.float().tolist(), self._encoding)
        self._cached_tokens += output.num_cached_tokens or 0
        prompts, request = self.rendered.prompts, self.rendered.request
        if len(self._vectors) < len(prompts):
            return []
        self.ended = True
        tokens = sum(prompt.prompt_tokens for prompt in prompts)
        usage = Usage(prompt_tokens=tokens, completion_tokens=0, cached_tokens=min(self._cached_tokens, tokens))
        vectors = [self._vectors[index] for index in range(len(prompts))]
        return embedding_deltas(request.request, request.attempt, vectors, usage)

    def fail(self, failure: Failure) -> Delta:
        """The delta that ends the request with ``failure``."""
        self.ended = True
        return refused(self.rendered.request, failure)

    def finish_exhausted(self) -> Delta:
        """Embeddings are never continued."""
        return self.fail(_bad("a request for embeddings cannot be continued", "input"))


def probe_parameters() -> PoolingParams:
    """The golden probe of an embedding model."""
    return PoolingParams(task="embed")


def probed_vector(output: Any) -> list[float]:
    """The vector that a probe gave.

    Raises:
        EngineError: none, or one with numbers that are not finite.
    """
    vector: list[float] = output.outputs.data.float().tolist()
    if not vector or not all(math.isfinite(number) for number in vector):
        raise EngineError("the golden probe gave no vector of finite numbers; the engine is not sane")
    return vector


def _bad(message: str, param: str) -> Failure:
    return Failure(kind=FailureKind.BAD_REQUEST, message=message, status=400, param=param)
