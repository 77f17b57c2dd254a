"""``carpool apply`` as its user sees it: a wrong file is one line with the file and the field, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from ops.cli import main
from profiles.tiny import make_tiny

EXAMPLES = Path(__file__).parents[2] / "ops" / "examples"
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


def test_a_tiny_model_is_made_once_and_can_be_applied(tmp_path: Path) -> None:
    """``carpool models make-tiny`` prints the folder; what is in it is labelled as random and serves as a source."""
    made = CliRunner().invoke(main, ["models", "make-tiny", "noise", "--seed", "4", "--directory", str(tmp_path / "noise")])
    assert (made.exit_code, made.stdout.strip()) == (0, str(tmp_path / "noise"))
    path = tmp_path / "noise.yaml"
    path.write_text(HEAD + "spec: {source: noise}\n")
    applied = CliRunner().invoke(main, ["apply", "--dry-run", "-f", str(path)])
    assert applied.exit_code == 0 and "random weights" in applied.output


def test_the_schema_for_editors_knows_the_examples() -> None:
    """``carpool schema`` prints JSON Schema by which our own examples are right and a typo is wrong (PRO-1)."""
    shown = CliRunner().invoke(main, ["schema"])
    validator = jsonschema.Draft202012Validator(json.loads(shown.stdout))
    for path in sorted(EXAMPLES.glob("*.yaml")):
        service = yaml.safe_load(path.read_text())
        validator.validate(service)
        assert not validator.is_valid(service | {"spek": {}})


def test_without_a_pool_the_commands_say_what_to_run(tmp_path: Path) -> None:
    """One line with the remedy and exit code 2, and nothing of a traceback."""
    for words in (["get", "models"], ["pin", "a"], ["apply", "-f", str(tmp_path / "no.yaml")]):
        result = CliRunner().invoke(main, words, env={"CARPOOL_STATE": str(tmp_path), "CARPOOL_NATS": ""})
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1 and "carpool up" in result.stderr
