"""Alerts advise commands that exist (OPS-3)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import click
import pytest

from ops.cli import main

ROOT = Path(__file__).resolve().parents[2]
REMEDY = re.compile(r"^carpool [a-z]")


def _remedies() -> list[str]:
    """Every string of the code that is a whole command line: constants, and f-strings with a word in each place."""
    found = set()
    for package in ("broker", "workers", "kvcache"):
        for path in sorted((ROOT / package).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in nodes:
                if id(node) in inside:
                    continue
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "word" for p in node.values]
                    text = "".join(str(part) for part in parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    text = node.value
                else:
                    continue
                if REMEDY.match(text) and "\n" not in text:
                    found.add(text.split(" or ")[0])
    return sorted(found)


@pytest.mark.parametrize("line", _remedies())
def test_a_remedy_is_a_command_that_parses(line: str) -> None:
    """Its words are a command of ours with arguments that the command takes."""
    words = line.split()[1:]
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, line
        command, words = found, words[1:]
        context = click.Context(command, parent=context)
    command.make_context(command.name, words, parent=context.parent)
