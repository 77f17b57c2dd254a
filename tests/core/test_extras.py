"""What only research needs is an extra: without it everything starts, and what needs it says so in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import importlib, pkgutil, sys
for name in ("highspy", "plotly", "river", "scipy"):
    sys.modules[name] = None  # an import of it fails
"""
EVERYTHING = """
import broker, carpool, kvcache, ops, profiles, subjects, workers
for package in (broker, carpool, kvcache, ops, profiles, subjects, workers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not any(engine in module.name for engine in ("vllm", "kv_tensors", "engine")):
            importlib.import_module(module.name)
print("all")
"""
LEARNING = """
from broker.scheduler.policies import make_policy
from subjects.errors import ConfigError
make_policy("carpool")
try:
    make_policy("carpool-learning")
except ConfigError as error:
    print(error)
"""


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, cwd=ROOT, check=False)


def test_everything_starts_without_the_extra() -> None:
    """Every module that is no engine's is imported: gateway, scheduler, worker, KV node, command line, simulator."""
    done = run("-c", WITHOUT + EVERYTHING)
    assert done.stdout == "all\n", done.stderr


def test_what_needs_the_extra_says_so() -> None:
    """Learning and the page of plots name what to install; the page before anything is simulated."""
    assert run("-c", WITHOUT + LEARNING).stdout == "river is not installed: pip install 'carpool[research]'\n"
    page = ["simulate", "--workload", "five-lines", "--html", "report.html"]
    done = run("-c", f"{WITHOUT}\nfrom ops.cli import main\nsys.argv[1:] = {page!r}\nmain()")
    assert done.returncode != 0
    assert done.stderr.strip().splitlines() == ["carpool: plotly is not installed: pip install 'carpool[research]'"]
