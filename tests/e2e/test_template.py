"""The fork template: what it forks is single-threaded, fresh, nobody's child, and outlives it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from subjects.errors import EngineError
from tests.e2e.engines import replica_spec
from tests.e2e.forking import fork, subreaping
from tests.waiting import until
from workers.template import Template

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

ENTRY = "tests.e2e.forked_engine:run"


@pytest.fixture(scope="module")
def subreaper() -> Iterator[None]:
    """This process is the parent of what the template forks."""
    with subreaping():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def template(subreaper: None) -> AsyncIterator[Template]:
    """One started template for the whole module."""
    template = Template(ENTRY)
    await template.start()
    yield template
    await template.stop()


async def test_a_forked_process_is_fresh(template: Template, tiny_model: Path) -> None:
    """One thread, a session and random numbers of its own, no descriptor of the template, and this process as its parent."""
    spec = replica_spec(str(tiny_model))
    first, second = await fork(template, spec), await fork(template, spec)
    born = [await first.ask("born"), await second.ask("born")]
    for forked, facts in zip((first, second), born, strict=True):
        assert facts["pid"] == facts["session"] == forked.pid
        assert (facts["threads"], facts["python_threads"]) == (1, 1)
        assert psutil.Process(forked.pid).ppid() == os.getpid()
    for kind in ("random", "numpy", "torch"):
        assert born[0][kind] != born[1][kind]
    assert template.pid is not None
    assert not _shared_sockets(template.pid, first.pid)
    assert await first.exit() == 0
    assert await second.exit("exit") == 7


async def test_engines_run_in_forked_processes(template: Template, tiny_model: Path) -> None:
    """Two engines forked at once load, warm and answer the same; a model that cannot be served is one line."""
    spec = replica_spec(str(tiny_model))
    tight = replica_spec(str(tiny_model), kv_bytes=100_000)
    missing = replica_spec(str(tiny_model / "nowhere"))
    first, second, third, fourth = [await fork(template, each) for each in (spec, spec, tight, missing)]
    started = await asyncio.gather(*(each.ask("start") for each in (first, second, third, fourth)))
    assert started[0]["kv_pages"] == started[1]["kv_pages"] > 0
    assert "KV cache" in started[2]["error"]
    assert "config.json cannot be read" in started[3]["error"]
    assert "\n" not in started[2]["error"]
    answers = [await first.ask("ask"), await second.ask("ask")]
    assert answers[0] == answers[1]
    assert answers[0]["text"]
    # The engine in the second one does not mind the end of the first.
    assert await first.exit("exit") == 7
    assert await second.ask("ask") == answers[0]
    for forked in (second, third, fourth):
        assert await forked.exit("exit") == 7


async def test_the_template_dies_alone(template: Template, tiny_model: Path) -> None:
    """Killed, or at the end of its agent's socket, it takes no forked process along; another template takes over."""
    spec = replica_spec(str(tiny_model))
    survivor = await fork(template, spec)
    assert template.pid is not None
    psutil.Process(template.pid).kill()
    await until(lambda: template.died, within_s=5.0)
    successor = await fork(template, spec)
    await template.start()
    # What is left of an agent that was killed: the end of its socket.
    assert template._socket is not None
    template._socket.shutdown(socket.SHUT_RDWR)
    await until(lambda: template.pid is None, within_s=5.0)
    for forked in (survivor, successor):
        assert (await forked.ask("born"))["pid"] == forked.pid
        assert await forked.exit("exit") == 7
    await template.stop()
    await template.stop()


async def test_an_entry_that_cannot_be_imported_fails_the_start(subreaper: None) -> None:
    """A template that cannot get ready says why and is gone."""
    template = Template("tests.e2e.no_such_module:run")
    with pytest.raises(EngineError, match="did not start: ModuleNotFoundError"):
        await template.start()
    assert not template.alive


def _shared_sockets(one: int, other: int) -> set[str]:
    """Sockets and pipes that both processes hold, standard streams aside."""

    def held(pid: int) -> set[str]:
        links = set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if int(fd) > 2:
                links.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        return {link for link in links if link.startswith(("socket:", "pipe:"))}

    return held(one) & held(other)
