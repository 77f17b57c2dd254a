"""What a process must have in place before it imports vLLM, and nothing else: light to import, safe before a fork."""

from __future__ import annotations

import os
import shutil
import warnings

from subjects.errors import EngineError

ENVIRONMENT = {
    # A replica never fetches anything: models are local directories.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library.triton",
    # Below errors vLLM logs configuration dumps at each start, and at debug level prompts.
    "VLLM_LOGGING_LEVEL": "ERROR",
    # The gateway takes so many; vLLM's own bound is OpenAI's, four.
    "VLLM_MAX_STOP_STRINGS": "16",
    # Replicas share cores; pinning each of them to the same first cores would be worse than none.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

CPU_ENVIRONMENT = {
    # Several replicas share the cores; a thread that waits for another must not burn the time that one needs.
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # numpy's BLAS starts its threads when it is imported, which no fork survives; torch has its own.
    "OPENBLAS_NUM_THREADS": "1",
    # Some helpers of vLLM are compiled on first use even with enforce_eager: the first request with logprobs took 20 s and
    # a C compiler. They run as plain Python instead.
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


def prepare_process(*, on_cpu: bool) -> None:
    """Sets the environment of vLLM, checks what it needs, and guards against its SIGILL on CPUs with AMX.

    Imports torch on the CPU path. It must run before the first import of vLLM, and again in a forked process.

    Raises:
        EngineError: something is missing, with the remedy.
    """
    os.environ.update(ENVIRONMENT)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(vllm|torch|transformers)\b.*")
    if not on_cpu:
        return
    os.environ.update(CPU_ENVIRONMENT)
    if shutil.which("lscpu") is None:
        raise EngineError("vLLM on CPU needs lscpu on PATH: install util-linux")
    try:
        import torch
    except ImportError as error:
        raise EngineError(f"vLLM on CPU is not installed ({error}): pip install 'carpool[cpu]' on Python 3.11") from None
    # The kernel grants AMX tiles per process and only when asked. A short first bf16 prompt otherwise dies of SIGILL.
    initialise_amx = getattr(torch.cpu, "_init_amx", None)
    if initialise_amx is not None:
        initialise_amx()


def one_line(error: BaseException) -> str:
    """The first line of an error, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
