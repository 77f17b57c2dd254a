"""Environments of the suites: each has its own below the user's cache, made once for each content of its lock.

A lock holds names and versions only; where they come from is the business of ``pip`` and ``npm`` as configured here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from profiles.paths import cache_dir
from subjects.errors import CarpoolError

LOCKS = Path(__file__).parent / "locks"
INSTALL_S_MAX = 600.0
STOP_S_MAX = 5.0
OUTPUT_BYTES_MAX = 1 << 20
_TAIL_CHARS = 1500


class ToolAbsent(CarpoolError):
    """What this machine lacks, in one line; the suite is skipped."""


def pinned(lock: str) -> dict[str, str]:
    """Names and versions of one lock."""
    lines = [line for line in (LOCKS / lock).read_text().splitlines() if line]
    return dict(line.split("==", 1) for line in lines)


async def python_of(name: str) -> Path:
    """The Python of an environment with all of ``locks/<name>.lock``.

    Raises:
        CarpoolError: pip could not install it.
    """
    lock = LOCKS / f"{name}.lock"
    with _made_once(name, lock) as (folder, fresh):
        python = folder / "venv" / "bin" / "python"
        if fresh:
            await _install([sys.executable, "-m", "venv", str(folder / "venv")], folder)
            # Compiled when imported: what a suite does not import needs no bytecode.
            words = ["--disable-pip-version-check", "--quiet", "--no-deps", "--no-compile"]
            await _install([str(python), "-m", "pip", "install", *words, "-r", str(lock)], folder)
        return python


async def npm_folder(name: str) -> Path:
    """A folder whose ``node_modules`` has all of ``locks/<name>.lock``.

    Raises:
        ToolAbsent: this machine has no ``node`` or no ``npm``.
        CarpoolError: npm could not install it.
    """
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise ToolAbsent(f"{program} is not on PATH")
    lock = LOCKS / f"{name}.lock"
    with _made_once(name, lock) as (folder, fresh):
        if fresh:
            packages = [f"{package}@{version}" for package, version in pinned(lock.name).items()]
            words = ["npm", "install", "--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
            await _install([*words, "--prefix", str(folder), *packages], folder)
        return folder


async def source_of(package: str, version: str) -> Path:
    """The unpacked source archive of a Python package, as the index has it.

    Raises:
        CarpoolError: pip could not fetch it, or the archive has no folder of that name.
    """
    import tarfile

    folder = cache_dir() / "extra" / "sources"
    unpacked = folder / f"{package}-{version}"
    if not unpacked.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
        await _install([*pip, "--no-binary", package, f"{package}=={version}", "--dest", str(folder)], folder)
        archive = folder / f"{package}-{version}.tar.gz"
        if not archive.is_file():
            raise CarpoolError(f"{package} {version}: the index has no source archive")
        partial = folder / f"{package}-{version}.new"
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(archive) as tar:
            tar.extractall(partial, filter="data")
        (partial / unpacked.name).rename(unpacked)
        shutil.rmtree(partial, ignore_errors=True)
    return unpacked


@contextlib.contextmanager
def _made_once(name: str, lock: Path) -> Iterator[tuple[Path, bool]]:
    """A folder of the cache, and whether it has to be filled. Only a block that ends well leaves it usable.

    Raises:
        CarpoolError: another process is filling it.
    """
    folder = cache_dir() / "extra" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("wb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CarpoolError(f"{folder} is being made by another process: run this again when it is ready") from None
        stamp = folder / "installed"
        wanted = f"{sys.version}\n{lock.read_text()}"
        fresh = not stamp.is_file() or stamp.read_text() != wanted
        if fresh:
            shutil.rmtree(folder)
            folder.mkdir()
        yield folder, fresh
        stamp.write_text(wanted)


async def _install(argv: Sequence[str], folder: Path) -> None:
    code, output = await run(argv, cwd=folder, environment=os.environ, timeout_s=INSTALL_S_MAX)
    if code:
        raise CarpoolError(f"{' '.join(argv[:5])} ... failed with code {code}: {output[-_TAIL_CHARS:]}")


async def run(argv: Sequence[str], *, cwd: Path, environment: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """Runs a program to its end and returns its exit code and all that it printed. Nothing that it started outlives it.

    Past ``timeout_s`` it is ended, and the code is that of the signal.
    """
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "ops.tether", str(os.getpid()), "--", shutil.which(argv[0]) or argv[0], *argv[1:]],
        cwd=cwd,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = bytearray()
    told = asyncio.create_task(_read(process, output))
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        # The program leads a group of its own: see ops.tether.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S_MAX)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(told), STOP_S_MAX)
    told.cancel()
    return process.returncode or 0, output.decode(errors="replace")


async def _read(process: asyncio.subprocess.Process, output: bytearray) -> None:
    """The last ``OUTPUT_BYTES_MAX`` bytes."""
    assert process.stdout is not None
    while part := await process.stdout.read(65536):
        output += part
        del output[:-OUTPUT_BYTES_MAX]
