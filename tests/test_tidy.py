"""House rules as tests: what may never be in the tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("carpool", "subjects", "profiles", "kvcache", "broker", "workers", "ops")


def _sources() -> list[Path]:
    return [path for package in (*PACKAGES, "tests") for path in sorted((ROOT / package).rglob("*.py"))]


def test_nothing_dangerous_is_called() -> None:
    """No pickle, eval, unsafe YAML or shell strings anywhere (PAINS O2)."""
    banned = re.compile(
        r"^\s*(import pickle|from pickle)|yaml\.(load|unsafe_load|full_load)\(|\beval\(|shell=True|os\.system\("
    )
    hits = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _sources()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if banned.search(line) and "SafeLoader" not in line and "model.eval()" not in line
    ]
    assert hits == []


def test_the_lock_holds_names_and_versions_only() -> None:
    """A lock line is ``name==version``: no URL, no path, no extra index."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert lines and [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []


def test_every_package_says_what_it_is() -> None:
    """The docstring of each folder is its contract."""
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            text = init.read_text()
            assert text.startswith('"""') and "TODO" not in text, init


def test_the_command_line_imports_nothing_heavy() -> None:
    """``carpool --help`` loads no engine, server or bus library; each command does when it runs."""
    code = "import sys, ops.cli; print(' '.join(sys.modules))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    )
    heavy = {
        "vllm",
        "torch",
        "transformers",
        "tokenizers",
        "starlette",
        "uvicorn",
        "nats",
        "httpx",
        "rich",
        "numpy",
        "asyncio",
    }
    assert loaded & heavy == set()


def test_readme_is_short() -> None:
    """The README stays under 150 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
