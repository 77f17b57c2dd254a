"""What vLLM itself says, in a process of its own and without any of our layers: the yardstick of the greedy oracle."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from subjects.errors import CarpoolError
from subjects.messages import ModelRecord

_REFERENCE_S_MAX = 300.0


class _Task(msgspec.Struct, frozen=True):
    directory: str
    context: int
    sequences: int
    kv_bytes: int
    block_size: int
    prompts: list[str]
    tokens: int


class _Result(msgspec.Struct, frozen=True):
    texts: list[str]
    margin: float


async def reference(record: ModelRecord, prompts: Sequence[str], tokens: int, directory: Path) -> tuple[list[str], float]:
    """Greedy answers (float32, eager, one thread), and the smallest distance in log probability between the chosen token and
    the next best: where it is tiny, another order of summation could choose the other.

    Raises:
        CarpoolError: vLLM did not run.
    """
    task = _Task(
        record.source,
        record.max_context_len,
        record.max_num_seqs,
        record.kv_bytes,
        record.block_size,
        list(prompts),
        tokens,
    )
    path = directory / "reference.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ops.prove.greedy_reference",
        str(path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(msgspec.json.encode(task)), _REFERENCE_S_MAX)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise CarpoolError(f"the reference run of vLLM failed: {errors.decode(errors='replace')[-800:]}")
    result = msgspec.json.decode(path.read_bytes(), type=_Result)
    return result.texts, result.margin


def main() -> None:
    """Reads a task on stdin and writes the result to the path in argv."""
    from workers.engines.vllm_process import prepare_process

    prepare_process(on_cpu=True)
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_Task)
    engine = LLM(
        model=task.directory,
        dtype="float32",
        enforce_eager=True,
        max_model_len=task.context,
        max_num_seqs=task.sequences,
        kv_cache_memory_bytes=task.kv_bytes,
        block_size=task.block_size,
    )
    sampling = SamplingParams(temperature=0, max_tokens=task.tokens, logprobs=2)
    texts: list[str] = []
    margin = float("inf")
    for prompt in task.prompts:
        output = engine.chat([{"role": "user", "content": prompt}], sampling, use_tqdm=False)[0].outputs[0]
        texts.append(output.text)
        for candidates in output.logprobs or ():
            best = sorted((candidate.logprob for candidate in candidates.values()), reverse=True)
            margin = min(margin, best[0] - best[1])
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(_Result(texts, round(margin, 6))))


if __name__ == "__main__":
    main()
