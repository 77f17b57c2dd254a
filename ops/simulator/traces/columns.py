"""Traces as columns: making, merging, cutting, copying."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from ops.simulator.traces.draws import stream
from ops.simulator.types import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


def text(path: Path) -> IO[str]:
    """A text file for reading, gzipped or not."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def one_model(arrival_s: Floats, input_tokens: Ints, output_tokens: Ints, model: int) -> Trace:
    """Requests of one model; sorted here. Every request has at least one input and one output token."""
    order = np.argsort(arrival_s, kind="stable")
    return Trace(
        arrival_s=np.ascontiguousarray(arrival_s[order], dtype=np.float64),
        model=np.full(len(arrival_s), model, dtype=np.int16),
        input_tokens=np.maximum(input_tokens[order], 1).astype(np.int32),
        output_tokens=np.maximum(output_tokens[order], 1).astype(np.int32),
    )


def merge(traces: Sequence[Trace]) -> Trace:
    """All requests in order of arrival; at equal times in the order of ``traces``."""
    arrival_s = np.concatenate([trace.arrival_s for trace in traces]) if traces else np.zeros(0)
    order = np.argsort(arrival_s, kind="stable")
    classes = [trace.sla_class for trace in traces if trace.sla_class is not None]
    if classes and len(classes) != len(traces):
        raise ValueError("either all traces carry a class per request or none")

    def column(name: str, dtype: type) -> npt.NDArray[np.int32]:
        parts = [getattr(trace, name) for trace in traces]
        joined: npt.NDArray[np.int32] = np.concatenate(parts)[order] if parts else np.zeros(0, dtype=dtype)
        return joined

    return Trace(
        arrival_s=arrival_s[order],
        model=column("model", np.int16).astype(np.int16),
        input_tokens=column("input_tokens", np.int32),
        output_tokens=column("output_tokens", np.int32),
        sla_class=np.concatenate(classes)[order] if classes else None,
    )


def only(trace: Trace, model: int) -> Trace:
    """The requests of one model."""
    return _chosen(trace, trace.model == model)


def thinned(trace: Trace, share: float, seed: int, name: str) -> Trace:
    """Each request with the probability ``share``."""
    return _chosen(trace, stream(seed, name, "thinned").random(len(trace)) < share)


def _chosen(trace: Trace, chosen: npt.NDArray[np.bool_]) -> Trace:
    return Trace(
        arrival_s=trace.arrival_s[chosen],
        model=trace.model[chosen],
        input_tokens=trace.input_tokens[chosen],
        output_tokens=trace.output_tokens[chosen],
        sla_class=None if trace.sla_class is None else trace.sla_class[chosen],
    )


def cut(trace: Trace, begin_s: float, end_s: float) -> Trace:
    """The requests that arrive in ``[begin_s, end_s)``, times unchanged."""
    first, last = np.searchsorted(trace.arrival_s, (begin_s, end_s), side="left")
    return Trace(
        arrival_s=trace.arrival_s[first:last],
        model=trace.model[first:last],
        input_tokens=trace.input_tokens[first:last],
        output_tokens=trace.output_tokens[first:last],
        sla_class=None if trace.sla_class is None else trace.sla_class[first:last],
    )


def jittered_copies(trace: Trace, factor: float, jitter_s: float, seed: int, name: str) -> Trace:
    """``factor`` times the traffic: each request at its own time, and copies of it moved by up to ``jitter_s`` either way.

    Of a factor such as 2.7 the last 0.7 is a copy with that probability. The shape of the load over times much longer than
    the jitter is kept. Copies that would leave the trace's span are reflected at its ends.
    """
    if factor < 1:
        raise ValueError("a factor below 1 would drop requests")
    count = len(trace)
    last_s = float(trace.arrival_s[-1]) if count else 0.0
    first_s = float(trace.arrival_s[0]) if count else 0.0
    parts = [trace]
    for copy in range(1, int(np.ceil(factor))):
        random = stream(seed, name, copy)
        moved = trace.arrival_s + (2.0 * random.random(count) - 1.0) * jitter_s
        moved = np.where(moved < first_s, 2.0 * first_s - moved, moved)
        moved = np.where(moved > last_s, 2.0 * last_s - moved, moved)
        kept = random.random(count) < factor - copy
        parts.append(replace(_chosen(trace, kept), arrival_s=moved[kept]))
    return merge(parts)
