"""Suites 2 to 4: ``langchain-tests`` with ``ChatOpenAI`` and ``OpenAIEmbeddings`` before a gateway of ours.

It runs in an environment of its own. ``$EXTRA_BASE_URL`` is the gateway's endpoint with ``/v1``. What these classes say of
the models is what the suite then asks for; whatever it skips for that is listed in ``exclusions.toml``.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

BASE_URL = os.environ["EXTRA_BASE_URL"]
ENDPOINT = {"base_url": BASE_URL, "api_key": "any", "max_retries": 0, "timeout": 120}


class _Chat(ChatModelIntegrationTests):  # type: ignore[misc]  # its package is not in our environment
    """Tools with forced choice, structured output in all ways, usage in streams."""

    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestScripted(_Chat):
    """The scripted model by chat completions."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # Behind another address than OpenAI's, langchain-openai does not ask for usage in streams by itself.
        return ENDPOINT | {"model": "scripted", "stream_usage": True}

    @property
    def model_override_value(self) -> str:
        return "scripted-too"


class TestScriptedResponses(_Chat):
    """The scripted model by responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return ENDPOINT | {"model": "scripted", "use_responses_api": True}

    @property
    def model_override_value(self) -> str:
        return "scripted-too"


class TestReal(_Chat):
    """SmolLM2-135M on vLLM."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return ENDPOINT | {"model": "smollm2", "stream_usage": True, "max_tokens": 192, "temperature": 0, "seed": 7}

    @property
    def model_override_value(self) -> str:
        return "smollm2-135m-instruct"


class TestEmbeddings(EmbeddingsIntegrationTests):  # type: ignore[misc]
    """Embeddings."""

    @property
    def embeddings_class(self) -> Any:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        # Else texts are cut by a tokenizer of OpenAI's, which is fetched, and sent as its token ids.
        return ENDPOINT | {"model": "embedder", "check_embedding_ctx_length": False}


class TestUnit(ChatModelUnitTests):  # type: ignore[misc]
    """What needs no server, with the same parameters."""

    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return ENDPOINT | {"model": "scripted", "stream_usage": True}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {"OPENAI_API_KEY": "any", "OPENAI_API_BASE": BASE_URL}
        return environment, {"model": "scripted"}, {"openai_api_key": "any", "openai_api_base": BASE_URL}
