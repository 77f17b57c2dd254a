"""One entry for a user's own file: a recording of ours, or any of the public formats (OPS-5)."""

from __future__ import annotations

import csv
import gzip
import zlib
from pathlib import Path

from ops.simulator.traces import aegaeon, azure, mooncake, recording, servegen
from ops.simulator.traces.limits import line_of
from ops.simulator.traces.recording import RecordedModel, Recording
from subjects.errors import ConfigError

HEAD_BYTES = 4_096
RATE_SCALE = 1.0


def read_trace(
    path: Path, *, seed: int = 0, begin_s: float = 0.0, end_s: float = 3_600.0, scale: float = RATE_SCALE
) -> Recording:
    """Recognises the format by what the file holds and reads it; every model that is not described is an 8B.

    - a recording of ours (``traces.recording``);
    - Azure LLM inference traces (``TIMESTAMP,ContextTokens,GeneratedTokens``), one model named like the file;
    - Mooncake traces (JSON lines with ``timestamp``, ``input_length``, ``output_length``), likewise;
    - Aegaeon's synthetic workloads (``Request Time,Model Name,Input Length,Output Length``);
    - a directory of ServeGen's (``chunk-*-trace.csv``), of which ``[begin_s, end_s)`` is drawn with ``seed`` at ``scale``
      times its rates; the other formats ignore these four.

    Raises:
        ConfigError: no such file, a format that is none of these, or content that its format does not allow; one line.
    """
    try:
        return _read(path, seed, begin_s, end_s, scale)
    except ConfigError as error:
        raise ConfigError(line_of(str(error))) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(line_of(f"{path}: not a whole gzip file ({error}); copy or compress it again")) from None
    except OSError as error:
        told = error.strerror or type(error).__name__
        raise ConfigError(line_of(f"{path}: cannot be read ({told}); check the path and its permissions")) from None
    except _UNREADABLE as error:
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(line_of(f"{path}: not of its format ({told}); correct it or export it again")) from None


_UNREADABLE = (
    OverflowError,
    ValueError,  # UnicodeDecodeError too
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    SyntaxError,
    RecursionError,
    MemoryError,
    csv.Error,
)
"""What a reader may meet in a file beside what it checks for: the last guard."""


def _read(path: Path, seed: int, begin_s: float, end_s: float, scale: float) -> Recording:
    if path.is_dir():
        trace = servegen.read_directory(path, end_s).sample(seed, begin_s, end_s, scale=scale)
        return Recording(names=(path.name,), models={path.name: RecordedModel()}, trace=trace)
    if not path.is_file():
        what = "is no regular file" if path.exists() else "no such file"
        raise ConfigError(f"{path}: {what}; give a recording, or a trace in a public format")
    name = path.name.split(".")[0]
    head = _head(path)
    first = head.partition(b"\n")[0].strip().lower()
    if first.startswith(b"timestamp,contexttokens"):
        return Recording(names=(name,), models={name: RecordedModel()}, trace=azure.read_csv(path).trace())
    if first.startswith(b"request time,"):
        names, trace = aegaeon.read_csv(path)
        return Recording(names=names, models={each: RecordedModel() for each in names}, trace=trace)
    if b'"input_length"' in first:
        return Recording(names=(name,), models={name: RecordedModel()}, trace=mooncake.read_jsonl(path).trace())
    if ".msgpack" in path.suffixes or first.startswith(b"{"):
        return recording.read_recording(path)
    raise ConfigError(
        f"{path}: neither a recording nor a trace of Azure's, Mooncake's, Aegaeon's or ServeGen's format; see --help"
    )


def _head(path: Path) -> bytes:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        return file.read(HEAD_BYTES)
