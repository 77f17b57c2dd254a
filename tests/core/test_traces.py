"""Readers of public traces on the packaged data, and the samplers against their sources (OPS-5, OPS-6)."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from ops.simulator.cases import Case, build, check
from ops.simulator.traces import aegaeon, azure, importing, limits, mooncake, recording, servegen
from ops.simulator.traces.columns import cut, jittered_copies, merge, one_model, thinned
from ops.simulator.traces.draws import FAMILIES, GAMMA, WEIBULL, lengths, poisson, renewals, stream
from ops.simulator.traces.recording import RecordedModel, RecordedRequest
from ops.simulator.types import Trace
from subjects.errors import ConfigError
from subjects.messages import SlaClass

HOUR_S = 3_600.0


@pytest.fixture(scope="module")
def sources() -> dict[str, servegen.ServeGenModel]:
    """Day 0 of all five models."""
    return servegen.packaged()


def same(one: Trace, other: Trace) -> bool:
    """Equal in every column."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("arrival_s", "model", "input_tokens", "output_tokens")
    )


# ------------------------------------------------------------------------------------------------------- packaged data


def test_servegen_has_the_rows_of_its_source(sources: dict[str, servegen.ServeGenModel]) -> None:
    """Client windows, length rows and requests of the day per model, as counted in the source."""
    assert {name: (len(model.cell), len(model.outputs)) for name, model in sources.items()} == {
        "m-small": (2748, 81),
        "m-mid": (8345, 171),
        "mm-image": (2094, 140),
        "deepseek-r1": (3111, 184),
        "m-large": (6819, 295),
    }
    requests = {name: float(model.total_rps(144).sum() * 600) for name, model in sources.items()}
    assert requests == pytest.approx(
        {"m-small": 85.092e6, "m-mid": 115.395e6, "mm-image": 0.81861e6, "deepseek-r1": 1.38367e6, "m-large": 24.131e6},
        rel=1e-4,
    )


def test_azure_has_the_rows_of_its_source() -> None:
    """Both services, their first and last request on the shared clock and their token sums."""
    code, conv = azure.packaged()["code"], azure.packaged()["conv"]
    assert (len(code.tick), len(conv.tick)) == (8819, 19366)
    assert (code.tick[0], code.tick[-1]) == (1239799600, 35599280160)
    assert conv.trace().arrival_s[[0, -1]] == pytest.approx([46.68059, 3548.402527])
    assert (int(code.input_tokens.sum()), int(conv.output_tokens.sum())) == (18059974, 4088665)


def test_aegaeon_and_mooncake_have_the_rows_of_their_sources() -> None:
    """Distinct length pairs and how often they occur; ten minutes of conversations with what their prefixes share."""
    pool = aegaeon.packaged()
    assert (len(pool.count), int(pool.count.sum())) == (8294, 71786)
    assert float((pool.input_tokens * pool.count).sum() / pool.count.sum()) == pytest.approx(699.44, abs=0.01)
    talks = mooncake.packaged()
    assert len(talks.arrival_ms) == 1750
    assert 0 < int(talks.shared_tokens.sum()) < int(talks.input_tokens.sum())


# ----------------------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("family", [GAMMA, WEIBULL])
@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5, 4.0])
def test_gaps_have_the_rate_and_cv_asked_for(family: int, cv: float) -> None:
    """Over 200,000 gaps the mean is within 3 % and the CV within 5 % of what was asked."""
    times = renewals(stream(5, FAMILIES[family]), family, cv, 2.0, 1e5, 1e5)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.5, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_bursty_cell_gets_no_more_requests_than_its_rate() -> None:
    """At CV 4 a process that began anew in each cell would give 7.5 requests too many; in equilibrium it is 10 as asked."""
    counts = [len(renewals(stream(6, cell), GAMMA, 4.0, 1.0, 10.0, 10.0)) for cell in range(8_000)]
    assert np.mean(counts) == pytest.approx(10.0, abs=0.7)


def test_what_is_drawn_up_to_an_instant_does_not_depend_on_the_end() -> None:
    """A process cut at 100 s is the beginning of the same one cut at 1,000 s."""
    short, long = (renewals(stream(7, "x"), WEIBULL, 3.0, 5.0, 1e3, until_s) for until_s in (100.0, 1e3))
    assert np.array_equal(short, long[long < 100.0])
    assert len(poisson(stream(7, "y"), 0.0, 100.0)) == 0


def test_draws_are_the_same_everywhere() -> None:
    """The digest rests on these: exact values, not approximate ones."""
    times = renewals(stream(8, "machine"), GAMMA, 2.0, 1.0, 100.0, 100.0)
    assert [float(one).hex() for one in times[:3]] == DRAWN


DRAWN = ["0x1.9faabc75264d6p+3", "0x1.9fb17bcaf045fp+3", "0x1.aa510327c2ca0p+3"]


def test_lengths_follow_their_quantiles() -> None:
    """Mid-points map to themselves, the ends do not go beyond the first and last, and in between it is linear."""
    quantiles = np.array([[10, 20, 40, 80]], dtype=np.int32)
    uniform = np.array([0.0, 0.125, 0.25, 0.375, 0.875, 0.999])
    drawn = lengths(quantiles, np.zeros(6, dtype=np.intp), uniform)
    assert drawn.tolist() == [10, 10, 15, 20, 80, 80]


# -------------------------------------------------------------------------------------------------------------- ServeGen


@pytest.mark.parametrize("name", servegen.MODELS)
def test_sampled_rates_follow_the_source(sources: dict[str, servegen.ServeGenModel], name: str) -> None:
    """An hour at some 20 requests per second: the count is within six standard errors of the source's, given its CVs."""
    model = sources[name]
    scale = 20.0 / float(model.total_rps(6).mean())
    trace = model.sample(11, 0, HOUR_S, scale=scale)
    hour = model.cell < 6
    expected = float(model.rate_rps[hour].sum() * 600 * scale)
    variance = float((model.rate_rps[hour] * 600 * scale * np.minimum(model.cv[hour], 4.0) ** 2).sum())
    assert abs(len(trace) - expected) < 6 * variance**0.5
    assert np.all(np.diff(trace.arrival_s) >= 0)
    assert trace.input_tokens.max() <= servegen.INPUT_TOKENS_MAX


def test_sampled_lengths_follow_the_source(sources: dict[str, servegen.ServeGenModel]) -> None:
    """deepseek-r1's mean output in the first six hours is that of its clients weighted by their rates, within 3 %."""
    model = sources["deepseek-r1"]
    trace = model.sample(12, 0, 21_600)
    rates = np.bincount(model.client[model.cell < 36], weights=model.rate_rps[model.cell < 36], minlength=200)
    rows = model.lengths_span == 0
    expected = np.average(model.outputs[rows].mean(axis=1), weights=rates[model.lengths_client[rows]])
    assert float(trace.output_tokens.mean()) == pytest.approx(expected, rel=0.03)


def test_one_client_alone_is_as_bursty_as_the_source_says(sources: dict[str, servegen.ServeGenModel]) -> None:
    """The busiest client of deepseek-r1 with a CV from 1.5 on: over its cell its gaps have that CV within 15 %."""
    model = sources["deepseek-r1"]
    row = max(np.flatnonzero((model.cv > 1.5) & (model.cv < 4.0)), key=lambda one: float(model.rate_rps[one]))
    times = renewals(stream(1, "one"), int(model.family[row]), float(model.cv[row]), 100.0, 600.0, 600.0)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(float(model.cv[row]), rel=0.15)


def test_the_same_request_appears_in_every_window(sources: dict[str, servegen.ServeGenModel]) -> None:
    """Windows that overlap, begin within a cell or end within one agree on what they share; another seed differs."""
    model = sources["m-large"]
    whole = model.sample(3, 0, 3_000, scale=0.02)
    for begin_s, end_s in ((0.0, 700.0), (650.0, 1_250.0), (1_799.5, 2_999.5)):
        part = model.sample(3, begin_s, end_s, scale=0.02)
        assert len(part) > 100
        assert same(part, cut(whole, begin_s, end_s))
    assert not same(whole, model.sample(4, 0, 3_000, scale=0.02))


def test_a_client_without_lengths_draws_from_the_others(sources: dict[str, servegen.ServeGenModel]) -> None:
    """m-large's busiest client has no lengths of its own: it draws those of clients that have, and never 0 tokens."""
    model = sources["m-large"]
    client = int(np.argmax(np.bincount(model.client, weights=model.rate_rps)))
    assert client not in set(model.lengths_client.tolist())
    drawn = model._lengths(stream(1, "z"), client, 0, 2_000)
    assert drawn[0].max() <= model.inputs[0].max()
    assert len(np.unique(drawn[0])) > 100


def test_nothing_is_drawn_in_a_gap_of_the_collection() -> None:
    """A cell without any client's rate between others stays empty."""
    cells = [servegen._Cell(1, cell, 1.0, 1.0, GAMMA) for cell in (0, 1, 4)]
    model = servegen.build("holey", cells, [servegen._Row(1, 0, {"input_tokens": [5] * 100}, [7] * 100)])
    arrived = model.sample(1, 0, 3_000).arrival_s
    assert not np.any((arrived >= 1_200) & (arrived < 2_400))
    assert np.any(arrived >= 2_400)


def test_servegen_directory(tmp_path: Path) -> None:
    """OPS-5: the source's own layout, whose distributions are text inside JSON; clients and bounds are kept."""
    directory = tmp_path / "m-tiny"
    directory.mkdir()
    (directory / "chunk-3-trace.csv").write_text("0,2.0,1.0,Gamma,1.0,0.5\n600,0,,,,\n1200,2.0,3.0,Weibull,0.5,0.2\n")
    (directory / "chunk-3-dataset.json").write_text(
        json.dumps({"0": {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{20: 1.0}"}})
    )
    model = servegen.read_directory(directory)
    assert (model.client.tolist(), model.cell.tolist(), model.family.tolist()) == ([3, 3], [0, 2], [GAMMA, WEIBULL])
    assert model.inputs[0][0, [0, 49, 50, 99]].tolist() == [100, 100, 300, 300]
    trace = importing.read_trace(directory, seed=1, end_s=600.0).trace
    assert 1_000 < len(trace) < 1_400
    assert set(np.unique(trace.output_tokens)) == {20}
    (directory / "chunk-4-trace.csv").write_text("what\n")
    with pytest.raises(ConfigError, match=r"chunk-4-trace\.csv:1"):
        servegen.read_directory(directory)


# --------------------------------------------------------------------------------------------------------------- columns


def _trace(arrivals: list[float], model: int = 0) -> Trace:
    ones: npt.NDArray[np.int32] = np.full(len(arrivals), 9, dtype=np.int32)
    return one_model(np.array(arrivals), ones, ones, model)


def test_merged_in_order_of_arrival() -> None:
    """Equal times keep the order of the traces."""
    both = merge([_trace([1.0, 3.0]), _trace([3.0, 2.0], 1)])
    assert (both.arrival_s.tolist(), both.model.tolist()) == ([1.0, 2.0, 3.0, 3.0], [0, 1, 0, 1])
    assert len(merge([])) == 0


def test_jittered_copies() -> None:
    """2.7 times the traffic: originals stay, copies are within the jitter and the span, and the total is 2.7 within 2 %."""
    one = _trace([float(second) for second in range(10_000)])
    more = jittered_copies(one, 2.7, 5.0, 1, "copies")
    assert len(more) == pytest.approx(27_000, rel=0.02)
    assert set(one.arrival_s.tolist()) <= set(more.arrival_s.tolist())
    assert (float(more.arrival_s.min()), float(more.arrival_s.max())) == (0.0, 9_999.0)
    assert np.all(np.diff(more.arrival_s) >= 0)
    seconds = np.bincount((more.arrival_s // 100).astype(int))
    assert seconds[1:-1] == pytest.approx(270, rel=0.15)
    assert len(thinned(one, 0.25, 1, "few")) == pytest.approx(2_500, rel=0.05)


# -------------------------------------------------------------------------------------------------- recordings, importing


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.msgpack", "r.msgpack.gz"])
def test_recordings_are_read_as_written(tmp_path: Path, name: str) -> None:
    """OPS-5: models are numbered by name, the first request is at second 0, a class per request where one has its own."""
    path = tmp_path / name
    requests = [
        RecordedRequest(at_s=1_700_000_002.5, model="b", input_tokens=10, output_tokens=0, sla_class=SlaClass.BRONZE),
        RecordedRequest(at_s=1_700_000_000.5, model="a", input_tokens=20, output_tokens=7),
    ]
    models = {"a": RecordedModel(size="70B", sla_class=SlaClass.GOLD)}
    packed = ".msgpack" in path.suffixes
    objects = [recording.Header(carpool_recording=recording.VERSION, models=models), *requests]
    lines = [msgspec.msgpack.encode(each) if packed else msgspec.json.encode(each) + b"\n" for each in objects]
    path.write_bytes(gzip.compress(b"".join(lines)) if path.suffix == ".gz" else b"".join(lines))
    read = importing.read_trace(path)
    assert read.names == ("a", "b")
    assert read.models == {**models, "b": RecordedModel()}
    assert read.trace.arrival_s.tolist() == [0.0, 2.0]
    assert read.trace.model.tolist() == [0, 1]
    assert read.trace.output_tokens.tolist() == [7, 1]
    assert read.trace.sla_class is not None
    assert [tuple(SlaClass)[one] for one in read.trace.sla_class] == [SlaClass.GOLD, SlaClass.BRONZE]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"at_s": 0, "model": "a", "input_tokens": 1, "output_tokens": 1, "messages": []}', "carries 'messages'"),
        ('{"carpool_recording": 9}\n{"at_s": 0, "model": "a", "input_tokens": 1, "output_tokens": 1}', "version 9"),
        ('{"at_s": 0, "model": "a", "input_tokens": -1, "output_tokens": 1}', "object 1: input_tokens: -1 is not"),
        ('{"at_s": 0, "model": "a"}', "input_tokens"),
        ('{"at_s": 0,', "r.jsonl:1"),
        ('{"carpool_recording": 1}', "no request"),
        ("what is this", "neither"),
    ],
)
def test_bad_recordings_are_refused(tmp_path: Path, content: str, told: str) -> None:
    """SEC-1: a recording that carries a prompt is refused; so is one that cannot be read, saying where."""
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=told):
        importing.read_trace(path)


def test_extra_fields_of_a_profile_are_ignored(tmp_path: Path) -> None:
    """A recorded Request Profile may be written as it is."""
    path = tmp_path / "r.jsonl"
    path.write_text('{"at_s": 3, "model": "a", "input_tokens": 1, "output_tokens": 1, "tenant": "t", "lane": "s"}\n')
    assert importing.read_trace(path).trace.arrival_s.tolist() == [0.0]


def test_public_formats_are_recognised(tmp_path: Path) -> None:
    """OPS-5: Azure (gzipped or not), Mooncake and Aegaeon files are known by their first line."""
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0319600,80,8\n"
    (tmp_path / "code.csv.gz").write_bytes(gzip.compress(rows.encode()))
    read = importing.read_trace(tmp_path / "code.csv.gz")
    assert (read.names, read.trace.input_tokens.tolist()) == (("code",), [4808, 80])
    assert read.trace.arrival_s[1] - read.trace.arrival_s[0] == pytest.approx(1.052)
    lines = [
        {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1300, "output_length": 6, "hash_ids": [1, 2, 4]},
    ]
    (tmp_path / "talk.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert importing.read_trace(tmp_path / "talk.jsonl").trace.arrival_s.tolist() == [0.0, 3.0]
    assert mooncake.read_jsonl(tmp_path / "talk.jsonl").shared_tokens.tolist() == [0, 1024]
    (tmp_path / "synth.csv").write_text(
        "Request Time,Model Name,Input Length,Output Length\n00:01:00.500,m2,5,6\n00:00:01.250,m1,7,8\n"
    )
    read = importing.read_trace(tmp_path / "synth.csv")
    assert (read.names, read.trace.arrival_s.tolist()) == (("m1", "m2"), [1.25, 60.5])
    (tmp_path / "bad.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,10\n")
    with pytest.raises(ConfigError, match=r"bad\.csv:2"):
        importing.read_trace(tmp_path / "bad.csv")
    with pytest.raises(ConfigError, match="no such file"):
        importing.read_trace(tmp_path / "absent.csv")


# ----------------------------------------------------------------------------------------------------------- hostile files


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROW = "2023-11-16 18:17:03.5,10,5\n"
AEGAEON = "Request Time,Model Name,Input Length,Output Length\n"
DEEP = 150_000


def ours(**changed: Any) -> str:
    """One request of our own format."""
    return json.dumps({"at_s": 1.0, "model": "a", "input_tokens": 1, "output_tokens": 1, **changed}) + "\n"


def talk(**changed: Any) -> str:
    """One request of Mooncake's."""
    return json.dumps({"timestamp": 0, "input_length": 5, "output_length": 5, **changed}) + "\n"


HOSTILE: list[tuple[str, str, str | bytes, str]] = [
    ("tokens over 31 bits, ours", "r.jsonl", ours() + ours(input_tokens=2**31), "object 2: input_tokens: 2147483648 is"),
    ("a billion tokens, ours", "r.jsonl", ours(output_tokens=10**9), "object 1: output_tokens: 1000000000 is"),
    ("tokens over 31 bits, Azure", "a.csv", AZURE + "2023-11-16 18:17:03,2147483648,1\n", "a.csv:2: ContextTokens: '2147"),
    ("negative tokens, Azure", "a.csv", AZURE + AZURE_ROW + "2023-11-16 18:17:04,5,-1\n", "a.csv:3: GeneratedTokens: '-1'"),
    ("digits without end, Azure", "a.csv", AZURE + f"2023-11-16 18:17:03,{'9' * 9_000},1\n", "a.csv:2: ContextTokens"),
    ("tokens over 31 bits, Aegaeon", "s.csv", AEGAEON + "00:00:01,m,1,2147483648\n", "s.csv:2: Output Length: '2147"),
    ("tokens over 31 bits, Mooncake", "t.jsonl", talk(input_length=2**31), "t.jsonl:1: input_length: 2147483648 is"),
    ("negative tokens, Mooncake", "t.jsonl", talk(output_length=-5), "t.jsonl:1: output_length: -5 is"),
    ("tokens of a huge number, Mooncake", "t.jsonl", talk(output_length=1e300), "t.jsonl:1: output_length: 1e+300 is"),
    ("a time of 1e12", "r.jsonl", ours(at_s=1e12), "object 1: at_s: 1000000000000.0 is not a time"),
    ("a time of 1e300", "r.jsonl", ours() + ours(at_s=1e300), "object 2: at_s: 1e+300 is not a time"),
    ("a time before all", "r.jsonl", ours(at_s=-1), "object 1: at_s: -1.0 is not a time"),
    ("a time that is NaN", "r.jsonl", ours(at_s=math.nan), "r.jsonl:1: "),
    (
        "a time that is NaN, packed",
        "r.msgpack",
        msgspec.msgpack.encode({**json.loads(ours()), "at_s": math.nan}),
        "nan is not",
    ),
    (
        "a time without end, packed",
        "r.msgpack",
        msgspec.msgpack.encode({**json.loads(ours()), "at_s": math.inf}),
        "inf is not",
    ),
    ("years apart", "r.jsonl", ours() + ours(at_s=1e8), "object 2: at_s: is over 31 days after that of object 1"),
    (
        "a target of nothing",
        "r.jsonl",
        '{"carpool_recording": 1, "models": {"a": {"tpot_s": 0}}}\n' + ours(),
        "object 1: models.a.tpot_s: 0.0 is not above 0",
    ),
    ("nested, ours", "r.jsonl", ours() + '{"a":' * DEEP + "1" + "}" * DEEP, "r.jsonl:2: "),
    ("nested, Mooncake", "t.jsonl", talk() + "[" * DEEP + "]" * DEEP, "t.jsonl:2: not JSON"),
    ("nested, packed", "r.msgpack", b"\x91" * DEEP, "r.msgpack: "),
    ("truncated gzip", "r.jsonl.gz", gzip.compress(ours().encode() * 9)[:-12], "not a whole gzip file"),
    ("bad gzip data", "r.jsonl.gz", gzip.compress(bytes(range(256)))[:10] + b"\xff" * 60, "not a whole gzip file"),
    ("bad gzip check sum", "r.jsonl.gz", gzip.compress(ours().encode())[:-8] + b"\0" * 8, "not a whole gzip file"),
    ("no gzip", "r.jsonl.gz", ours(), "not a whole gzip file"),
    ("not in order", "a.csv", AZURE + AZURE_ROW + "2023-11-16 18:17:02,1,1\n", "a.csv:3: TIMESTAMP: is before"),
    (
        "mixed time zones",
        "a.csv",
        AZURE + "2024-05-10 00:00:00.1+00:00,1,1\n2024-05-10 00:00:01.1+02:00,1,1\n",
        "a.csv:3: TIMESTAMP: its time zone",
    ),
    ("some without a zone", "a.csv", AZURE + AZURE_ROW + "2023-11-16 18:17:04Z,1,1\n", "a.csv:3: TIMESTAMP: its time zone"),
    ("years apart, Azure", "a.csv", AZURE + AZURE_ROW + "2024-11-16 18:17:02,1,1\n", "a.csv:3: TIMESTAMP: is over 31 days"),
    ("no such day, Azure", "a.csv", AZURE + "2023-13-45 18:17:02,1,1\n", "a.csv:2: TIMESTAMP: '2023-13-45"),
    ("latin-1", "a.csv", AZURE.encode() + b"2023-11-16 18:17:03,1,\xe9\n", "a.csv: not UTF-8 text"),
    ("a huge field", "s.csv", AEGAEON + f"00:00:01,{'m' * 200_000},1,1\n", "s.csv:2: not CSV (field larger"),
    ("a missing column, Azure", "a.csv", AZURE + "2023-11-16 18:17:03,1\n", "a.csv:2: 2 columns where TIMESTAMP"),
    ("a missing column, Aegaeon", "s.csv", "Request Time,Model Name\n00:00:01,m\n", "s.csv:1: no column 'Input Length'"),
    ("a short row, Aegaeon", "s.csv", AEGAEON + "00:00:01,m\n", "s.csv:2: 2 columns where Request Time"),
    ("a missing field, Mooncake", "t.jsonl", talk() + '{"timestamp": 1}\n', "t.jsonl:2: input_length: is missing"),
    ("a list, Mooncake", "t.jsonl", talk() + "[1]\n", "t.jsonl:2: list where an object"),
    ("blocks that are none, Mooncake", "t.jsonl", talk(hash_ids=7), "t.jsonl:1: hash_ids: not a list"),
    *(
        (f"a time of {time}, Aegaeon", "s.csv", AEGAEON + f"{time},m,1,1\n", "s.csv:2: Request Time: ")
        for time in ("00:00:nan", "00:00:inf", "00:00:-5", "-1:90:00", "9999:00:00", f"{'9' * 400}:0:0", "5", "")
    ),
    *(
        (f"a time of {time}, Mooncake", "t.jsonl", talk(timestamp=time), "t.jsonl:1: timestamp: ")
        for time in (-1, 1e300, 10**400, None, True, "x", [1])
    ),
    ("no rows, Azure", "a.csv", AZURE, "a.csv: no request in it"),
    ("no rows, Aegaeon", "s.csv", AEGAEON, "s.csv: no request in it"),
    ("nothing", "a.csv", "", "a.csv: neither"),
]


@pytest.mark.parametrize(("name", "content", "told"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_hostile_files_are_refused_in_one_line(tmp_path: Path, name: str, content: str | bytes, told: str) -> None:
    """OPS-5: whatever a file holds, one short line names it, where in it and what is wrong, with a remedy."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        importing.read_trace(path)
    line = str(caught.value)
    assert line.startswith(str(path)) and told in line and ";" in line
    assert line.isprintable() and len(line) <= limits.TEXT_CHARS_MAX


def test_what_the_limits_allow_is_read(tmp_path: Path) -> None:
    """The most tokens and the longest span pass, in each format that can say them."""
    most = limits.TOKENS_MAX
    (tmp_path / "r.jsonl").write_text(ours(input_tokens=most) + ours(at_s=1.0 + limits.SPAN_S_MAX))
    (tmp_path / "a.csv").write_text(AZURE + f"2024-05-01 00:00:00-05:00,{most},0\n\n2024-06-01 00:00:00-05:00,1,1\n")
    (tmp_path / "t.jsonl").write_text(talk(input_length=most) + talk(timestamp=limits.SPAN_S_MAX * 1_000))
    (tmp_path / "s.csv").write_text(AEGAEON + f"00:00:00,m,{most},0\n744:00:00,m,1,1\n")
    for name in ("r.jsonl", "a.csv", "t.jsonl", "s.csv"):
        trace = importing.read_trace(tmp_path / name).trace
        assert (trace.arrival_s.tolist(), int(trace.input_tokens[0])) == ([0.0, limits.SPAN_S_MAX], most)


@pytest.mark.parametrize(
    ("row", "dataset"),
    [
        ("0,inf,1,Gamma", "{}"),
        ("0,1e9,1,Gamma", "{}"),
        ("nan,1,1,Gamma", "{}"),
        ("0,1,nan,Gamma", "{}"),
        ("0,1,1,Gamma", "{}"),
        ("0,1,1,Gamma", "[1]"),
        ("0,1,1,Gamma", '{"0": {"input_tokens": "{1e12: 1}", "output_tokens": "{1: 1}"}}'),
        ("0,1,1,Gamma", '{"0": {"input_tokens": "{", "output_tokens": "{1: 1}"}}'),
        ("0,1,1,Gamma", "[" * DEEP),
    ],
)
def test_hostile_directories_are_refused_in_one_line(tmp_path: Path, row: str, dataset: str) -> None:
    """OPS-5: rates without end and distributions that are none, in ServeGen's layout."""
    (tmp_path / "chunk-1-trace.csv").write_text(row + "\n")
    (tmp_path / "chunk-1-dataset.json").write_text(dataset)
    with pytest.raises(ConfigError) as caught:
        importing.read_trace(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("requests", "load"), [(ours() + ours(at_s=1.1), 1.0), (ours() + ours(at_s=61.0), 1e-9)])
def test_a_trace_of_which_nothing_would_be_measured_is_refused(tmp_path: Path, requests: str, load: float) -> None:
    """All requests inside the warm-up, or none kept: an error instead of a row of zeros."""
    path = tmp_path / "r.jsonl"
    path.write_text(requests)
    with pytest.raises(ConfigError, match=r"^--trace .*r\.jsonl: no request arrives .*nothing would be measured"):
        build(check(Case(workload="r", trace=str(path), load=load)))


def test_a_trace_that_asks_for_more_gpus_than_are_simulated_is_refused(tmp_path: Path) -> None:
    """One request of the most tokens would be a pool of 334,416 GPUs; with --gpus it is what the user says."""
    path = tmp_path / "r.jsonl"
    path.write_text(ours() + ours(at_s=101.0, output_tokens=limits.TOKENS_MAX))
    with pytest.raises(ConfigError, match=r"^--trace .*r\.jsonl: its busiest minutes ask for a pool of 334416 GPUs.*--gpus"):
        build(check(Case(workload="r", trace=str(path))))
    assert build(check(Case(workload="r", trace=str(path), gpus=8))).pool.devices == 8


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "the name is empty"),
        ("/dev/null", "/dev/null: is no regular file"),
        (str(Path(__file__).parent), "a directory without a chunk"),
        ("x" * 5_000, "no such file"),
    ],
)
def test_what_is_no_file_is_refused(given: str, told: str) -> None:
    """The command ends with the one line of a wrong --trace, before any simulation."""
    from ops.simulate_cli import simulate

    result = CliRunner().invoke(simulate, ["--trace", given])
    assert isinstance(result.exception, ConfigError) and result.exit_code != 0
    assert str(result.exception).startswith("--trace") and told in str(result.exception)
