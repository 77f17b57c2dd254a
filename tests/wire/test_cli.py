"""``carpool apply`` as its user sees it: a wrong file is one line with the file and the field, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.cli import main
from profiles.tiny import make_tiny

HEAD = "apiVersion: llm.serving/v1\nkind: ModelService\nmetadata: {name: a}\n"

# Each row: a name, what follows the head, and what the one line must name.
BAD = [
    ("not YAML", "spec: {", "line 5"),
    ("unknown field", "spec: {sorce: x}", "'sorce'"),
    ("text for a number", "spec: {sla: {tpot_ms: '5'}}", "spec.sla.tpot_ms"),
    ("not a number", "spec: {strategy: {max_wait_s: .nan}}", "spec.strategy.max_wait_s"),
    ("unknown engine", "spec: {engine: {type: trt}}", "spec.engine.type"),
    ("no source", "spec: {}", "spec.source"),
    ("no such folder", "spec: {source: nowhere}", "spec.source"),
    ("an empty folder", "spec: {source: empty}", "spec.source"),
    ("a folder with half a model", "spec: {source: half}", "spec.source"),
    ("configuration that is no JSON", "spec: {source: broken}", "spec.source"),
    ("unknown built-in model", "spec: {source: 'builtin:nothing'}", "spec.source"),
    (
        "more context than the model has",
        "spec: {source: good, engine: {max_context_len: 99999}}",
        "spec.engine.max_context_len",
    ),
    (
        "less KV than one longest context",
        "spec: {engine: {type: simulated, max_context_len: 4096, kv_cache_bytes: 1MiB}}",
        "spec.engine.kv_cache_bytes",
    ),
    ("no tokenizer there", "spec: {tokenizer: empty, engine: {type: simulated}}", "spec.tokenizer"),
    (
        "a size below zero",
        "spec: {engine: {type: simulated, options: {weights_bytes: -3}}}",
        "spec.engine.options.weights_bytes",
    ),
    ("a server without context", "spec: {source: 'http://h/v1', engine: {type: openai_http}}", "max_context_len"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders, whole and broken, and one file for each row."""
    folder = tmp_path_factory.mktemp("services")
    good = make_tiny("good", folder / "good", seed=3)
    for name in ("empty", "half", "broken"):
        (folder / name).mkdir()
    (folder / "half" / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes())
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / "broken" / name).write_bytes((good / name).read_bytes())
    (folder / "broken" / "config.json").write_text("{")
    return folder


@pytest.mark.parametrize(("text", "field"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_wrong_file_is_told_in_one_line(folder: Path, text: str, field: str) -> None:
    """Nothing is applied, and the line names the file and the field (PRO-1)."""
    path = folder / "models.yaml"
    path.write_text(HEAD + text + "\n")
    result = CliRunner().invoke(main, ["apply", "--dry-run", "-f", str(path)])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"carpool: {path}: "), lines
    assert field in lines[0]


def test_a_name_in_two_files(folder: Path) -> None:
    """The second file is named."""
    for name in ("one.yaml", "two.yaml"):
        (folder / name).write_text(HEAD + "spec: {engine: {type: simulated}}\n")
    files = ["-f", str(folder / "one.yaml"), "-f", str(folder / "two.yaml")]
    result = CliRunner().invoke(main, ["apply", "--dry-run", *files])
    assert result.exit_code == 2
    assert str(folder / "two.yaml") in result.stderr and "metadata.name" in result.stderr


def test_a_good_file_tells_what_it_needs(folder: Path) -> None:
    """Memory by its parts, KV per token and context, computed from the files."""
    path = folder / "good.yaml"
    path.write_text(HEAD + "spec: {source: good, engine: {max_context_len: 1024, kv_cache_bytes: 16MiB}}\n")
    result = CliRunner().invoke(main, ["apply", "--dry-run", "-f", str(path)])
    assert result.exit_code == 0, result.output
    for part in ("a: would be applied", "KV 16 MiB", "B of KV per token", "context 1024", "random weights"):
        assert part in result.output
