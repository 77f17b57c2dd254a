"""Pools of one brain, case by case: each is small, has real processes, and says in sentences what is wrong with it.

Most cases are what pools did wrong before one policy decided for all models; bounds are those of the case, in seconds.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import click

from ops.prove.judging import longest_wait_s, share_error
from ops.prove.scripted_server import ScriptedServer
from ops.prove.stage import GIVEN, Stage, model
from ops.prove.workplace import Answer, service
from subjects.messages import ResizeKv

Faults = list[str]
Case = Callable[[Stage], Awaitable[Faults]]

NEWCOMER_S_MAX = 8.0
"""An idle resident leaves, and a load of a moment."""
BUSY_S = 60.0
BUSY_ANSWERS_MIN = 270
BUSY_WAIT_S_MAX = 12.4
"""Of two models with three clients each: nine tenths of what simple turns by the clock gave, and their longest wait."""
SURGE_S_MAX = 2.0
GROWN_S_MAX = 15.0
LEFT_S_MAX = 12.0
WEIGHTS_OFF_MAX = 0.15


def answered(answers: Sequence[Answer], wait_s_max: float | None = None) -> Faults:
    """That all were answered whole, and nobody waited longer."""
    faults = []
    if bad := [answer for answer in answers if not answer.whole]:
        one = bad[0]
        faults.append(
            f"{len(bad)} of {len(answers)} not answered: {one.model}: {one.status} {one.error or one.finish_reason}"
        )
    if wait_s_max is not None and (waited_s := longest_wait_s(answers)) > wait_s_max:
        faults.append(f"one waited {waited_s:.1f} s, bound {wait_s_max:g} s")
    return faults


def unless(holds: bool, fault: str) -> Faults:
    """``fault`` where something does not hold."""
    return [] if holds else [fault]


def parses(line: str) -> bool:
    """Whether a remedy is a command that exists, with arguments that it takes, or no command at all."""
    from ops.cli import main

    words = shlex.split(line.split(" or ")[0])
    if words[:1] != ["carpool"]:
        return True
    command: click.Command | None = main
    context, words = click.Context(main), words[1:]
    while isinstance(command, click.Group) and words:
        command, words = command.get_command(context, words[0]), words[1:]
    if command is None:
        return False
    try:
        command.make_context(command.name, words, parent=context)
    except click.UsageError:
        return False
    return True


# ------------------------------------------------------------------------------------------- turns among models that share


async def newcomer(stage: Stage) -> Faults:
    """An idle resident leaves for a newcomer; both have costs."""
    async with stage.pool(model("first", given=True) + model("second", given=True), "cpu:1GiB") as seen:
        return answered([await seen.ask("first")]) + answered([await seen.ask("second")], NEWCOMER_S_MAX)


async def crowd(stage: Stage) -> Faults:
    """Forty wait for a model beside an idle one: none is refused."""
    async with stage.pool(model("first", given=True) + model("second", given=True), "cpu:1GiB") as seen:
        first = await seen.ask("first")
        return answered([first]) + answered(await seen.crowd("second", 40), NEWCOMER_S_MAX + 5 * 0.2)


async def three_fit(stage: Stage) -> Faults:
    """A device holds as many models as its memory: three small ones on 4 GiB stay side by side."""
    names = ("one", "two", "three")
    async with stage.pool("".join(model(name, 0.147, given=True) for name in names), "cpu:4GiB") as seen:
        answers = [await seen.ask(name) for name in names]
        together = await seen.until(lambda: all(seen.ready(name) for name in names), 5)
        return answered(answers, NEWCOMER_S_MAX) + unless(together, "they do not stay together")


async def cold_beside_idle(stage: Stage) -> Faults:
    """One model with costs in its file, cold, beside two idle ones without."""
    services = model("idle-1", 0.4) + model("idle-2", 0.4) + model("cold", 0.4, given=True)
    async with stage.pool(services, "cpu:1GiB") as seen:
        warm = [await seen.ask(name) for name in ("idle-1", "idle-2")]
        return answered(warm) + answered([await seen.ask("cold")], NEWCOMER_S_MAX)


async def two_busy(stage: Stage) -> Faults:
    """Two models, three clients each that never pause, and room for one: they take turns and lose little by it."""
    services = "".join(model(name, given=True, step_s=0.0, strategy="max_wait_s: 110") for name in "ab")
    async with stage.pool(services, "cpu:1GiB") as seen:
        answers = await seen.busy("aaabbb", BUSY_S, 32)
        many = len(answers) >= BUSY_ANSWERS_MIN
        return answered(answers, BUSY_WAIT_S_MAX) + unless(many, f"{len(answers)} answers, at least {BUSY_ANSWERS_MIN}")


# ------------------------------------------------------------------------------------------------------------ deployments


def _served(server: ScriptedServer, name: str, *, context: int, strategy: str = "", more: str = "") -> str:
    engine = f"type: openai_http, max_num_seqs: 4, max_context_len: {context}{more}"
    text = service(name, server.url, engine, resources="baseline_memory_gb: 0.2", strategy=strategy or "max_wait_s: 30")
    return text.replace(f"  source: {server.url}", f"  source: {server.url}\n  model: scripted")


async def tenants(stage: Stage) -> Faults:
    """Two services of the same files for two tenants never share a replica nor a device."""
    async with ScriptedServer() as server:
        services = "".join(
            _served(server, f"for-{who}", context=4096, strategy=f"max_wait_s: 30, tenant: {who}") for who in ("red", "blue")
        )
        async with stage.pool(services, "cpu:1GiB", "cpu:1GiB") as seen:
            answers = [await seen.ask(name) for name in ("for-red", "for-blue", "for-red")]
            shared = [sample for sample in seen.samples if any(len(set(held)) > 1 for held in sample.devices.values())]
            apart = answers[0].replica != answers[1].replica
            return answered(answers) + unless(apart, "one replica answers both") + unless(not shared, "they share a device")


async def lengths(stage: Stage) -> Faults:
    """The same files with another context length are another deployment: a long prompt goes to the long one."""
    async with ScriptedServer() as server:
        services = _served(server, "a-short", context=512) + _served(server, "long", context=2048)
        async with stage.pool(services, "cpu:1GiB") as seen:
            short = await seen.ask("a-short")
            long = await seen.ask("long", prompt="word " * 800)
            apart = short.replica != long.replica
            return answered([short, long]) + unless(apart, "one replica answers both")


async def equals(stage: Stage) -> Faults:
    """Equal deployments share a replica, and apply says so."""
    async with ScriptedServer() as server:
        services = _served(server, "one", context=2048)
        other = _served(server, "other", context=2048, more=", max_output_tokens_default: 7")
        async with stage.pool(services, "cpu:1GiB") as seen:
            notes = " ".join(row.get("note", "") for row in await seen.apply(services + other))
            answers = [await seen.ask(name) for name in ("one", "other")]
            together = answers[0].replica == answers[1].replica
            return (
                answered(answers)
                + unless(together, "they do not share a replica")
                + unless("share" in notes and "one" in notes, f"apply does not say that they share: {notes!r}")
            )


async def shapes(stage: Stage) -> Faults:
    """20 GiB of KV, or two devices, are not ready because another deployment of the same files is."""

    def tiny(name: str, kv: str, gpus: int = 1) -> str:
        engine = f"type: vllm, dtype: float32, max_context_len: 512, kv_cache_bytes: {kv}"
        return service(name, "builtin:tiny-0", engine, resources=f"gpus: {gpus}", strategy="max_wait_s: 60")

    services = tiny("small", "32MiB") + tiny("huge", "20GiB") + tiny("wide", "32MiB", 2)
    async with stage.pool(services, "cpu:1GiB", flags=("--threads", "1")) as seen:
        faults = answered([await seen.ask("small")])
        for name in ("huge", "wide"):
            row = await seen.row("models", name)
            faults += unless(row["state"] not in ("ready", "loading"), f"{name} is {row['state']}")
            answer = await seen.ask(name)
            typed = bool(answer.error) and not answer.text and answer.ended_s - answer.begun_s < 5
            faults += unless(
                typed, f"{name}: {answer.status} {answer.error!r} after {answer.ended_s - answer.begun_s:.1f} s"
            )
        return faults


# ------------------------------------------------------------------------------------------------- replicas come and leave


async def growth(stage: Stage) -> Faults:
    """Twenty-four clients on one replica and two empty devices: the model gets them, and uses them."""
    async with stage.pool(model("grows", step_s=0.05), *["cpu:1GiB"] * 3) as seen:
        clients = asyncio.create_task(seen.busy(["grows"] * 24, GROWN_S_MAX + 6, 20))
        grown = await seen.until_ready("grows", 3, GROWN_S_MAX)
        answers = await clients
        used = len({answer.replica for answer in answers if answer.begun_s > answers[-1].ended_s - 4})
        return (
            answered(answers)
            + unless(grown, f"{seen.ready('grows')} replicas after {GROWN_S_MAX:g} s")
            + unless(used == 3, f"{used} of 3 answer")
        )


async def idle_neighbours(stage: Stage) -> Faults:
    """Thirty-two wait at one replica while two others have been idle for long: they leave, and their places are used."""
    services = "".join(model(name, step_s=0.05) for name in ("idle-1", "idle-2", "asked"))
    async with stage.pool(services, *["cpu:1GiB"] * 3) as seen:
        warm = [await seen.ask(name) for name in ("idle-1", "idle-2", "asked")]
        await asyncio.sleep(8)
        clients = asyncio.create_task(seen.busy(["asked"] * 32, GROWN_S_MAX, 20))
        grown = await seen.until_ready("asked", 3, GROWN_S_MAX)
        return answered([*warm, *await clients]) + unless(grown, f"{seen.ready('asked')} of 3 after {GROWN_S_MAX:g} s")


async def surge(stage: Stage) -> Faults:
    """Two hundred wait: several replicas start at once."""
    async with stage.pool(model("surge", slots=4, load_s=2.0, step_s=0.05), *["cpu:1GiB"] * 4) as seen:
        answers = await seen.crowd("surge", 200, 10)
        begun_s = [at_s for at_s, _ in seen.heard.loads("surge")]
        several = len(begun_s) >= 3 and begun_s[2] - begun_s[0] <= SURGE_S_MAX
        when = ", ".join(f"{at_s - begun_s[0]:.1f}" for at_s in begun_s)
        return answered(answers) + unless(several, f"loads after {when} s: three at most {SURGE_S_MAX:g} s apart")


async def lowered(stage: Stage) -> Faults:
    """A lowered ``max_replicas`` lets the surplus leave, and cuts no answer."""
    async with stage.pool(model("many", strategy="min_replicas: 2, max_replicas: 2"), "cpu:1GiB", "cpu:1GiB") as seen:
        faults = unless(await seen.until_ready("many", 2, 20), "two replicas did not come")
        clients = asyncio.create_task(seen.busy(["many"] * 3, 6, 20))
        await asyncio.sleep(2)
        await seen.apply(model("many", strategy="max_replicas: 1"))
        left = await seen.until_ready("many", 1, LEFT_S_MAX)
        return faults + answered(await clients) + unless(left, f"{seen.ready('many')} replicas stay")


async def kept(stage: Stage) -> Faults:
    """Idle surplus leaves after the time that its file says."""
    async with stage.pool(model("many", step_s=0.05, strategy="keep_s: 4"), "cpu:1GiB", "cpu:1GiB") as seen:
        clients = asyncio.create_task(seen.busy(["many"] * 16, 20, 20))
        faults = unless(await seen.until_ready("many", 2, 20), "two replicas did not come")
        faults += answered(await clients)
        gone = await seen.until(lambda: seen.ready("many") < 2, 4 + LEFT_S_MAX)
        return faults + unless(gone, "both stay, though idle")


# ---------------------------------------------------------------------------------------- nothing ordered that is refused


async def fixed_kv(stage: Stage) -> Faults:
    """An engine that cannot resize its KV is not asked to."""
    one = model("fixed", context=32768, kv="64MiB", given=True, options={"resizes_kv": False})
    async with stage.pool(one + model("other", given=True, options={"resizes_kv": False}), "cpu:2GiB") as seen:
        answers = await seen.busy(["fixed", "fixed", "other"], 15, 40)
        resized = [command for _, command in seen.heard.commands.values() if isinstance(command, ResizeKv)]
        return answered(answers) + unless(not resized, f"resize-kv was ordered {len(resized)} times")


async def long_context(stage: Stage) -> Faults:
    """A vLLM model of more than 20,000 tokens of context, with costs, loads, with KV for one longest context at least."""
    from profiles.tiny import make_tiny

    source = make_tiny("long", stage.directory / "long", seed=3, max_context_len=32768)
    engine = "type: vllm, dtype: float32, max_num_seqs: 4, max_context_len: 32768"
    services = service("long", str(source), engine, resources=GIVEN, strategy="max_wait_s: 60")
    async with stage.pool(services, "cpu:2GiB", flags=("--threads", "1")) as seen:
        faults = answered([await seen.ask("long")])
        short = [
            load.record for _, load in seen.heard.loads() if load.record.kv_bytes < 32768 * load.record.kv_bytes_per_token
        ]
        return faults + unless(not short, f"it starts with {[record.kv_bytes for record in short]} bytes of KV")


async def observed(stage: Stage) -> Faults:
    """A model that may only be observed is neither loaded nor evicted."""
    services = model("watched", strategy="mode: observe, max_wait_s: 5") + model("held")
    services += model("newcomer", strategy="max_wait_s: 8")
    async with stage.pool(services, "cpu:1GiB") as seen:
        refused = [await seen.ask("watched")]
        faults = answered([await seen.ask("held")])
        await seen.tell("mode", model="held", mode="observe")
        refused.append(await seen.ask("newcomer"))
        return (
            faults
            + unless(not seen.heard.loads("watched"), "it was loaded")
            + unless(await seen.until_ready("held", 1, 3), "it was evicted")
            + unless(not any(answer.whole for answer in refused), "what it holds back was answered")
        )


# ----------------------------------------------------------------------------------------------------- what people are told


async def advice(stage: Stage) -> Faults:
    """What may only be advised is said, with what acting would save."""
    async with stage.pool(model("advised", strategy="mode: advise, max_wait_s: 5"), "cpu:1GiB") as seen:
        answer = await seen.ask("advised")
        said = [
            row["reason"] for row in await seen.get("timeline") if row["action"] == "advice" and row["model"] == "advised"
        ]
        saves = any(re.search(r"\bsav", text) and re.search(r"\d", text) for text in said)
        return (
            unless(not answer.whole, "it was answered")
            + unless(bool(said), "nothing is advised")
            + unless(saves or not said, f"no word on what it would save: {said[:1]}")
        )


async def remedies(stage: Stage) -> Faults:
    """Alerts advise commands that exist."""
    services = model("broken", strategy="max_wait_s: 6", options={"load_fails": True})
    services += model("vast", 30, strategy="min_replicas: 1") + model("dies", options={"die_after_tokens": 3})
    async with stage.pool(services, "cpu:1GiB") as seen:
        await asyncio.gather(seen.ask("broken"), seen.ask("dies", 8))
        await asyncio.sleep(2)
        lines = sorted({alert.remedy for alert in seen.heard.alerts})
        wrong = [line for line in lines if not parses(line)]
        return unless(bool(lines), "no alert was heard") + [f"`{line}` is no command" for line in wrong]


async def queues(stage: Stage) -> Faults:
    """``get queues`` counts who waits: behind a full replica, and for a model that is being loaded."""
    services = model("full", slots=1, step_s=0.1, strategy="max_wait_s: 60, max_replicas: 1") + model("cold", load_s=8.0)
    async with stage.pool(services, "cpu:4GiB") as seen:
        faults = answered([await seen.ask("full")])
        asked = [asyncio.create_task(seen.crowd(name, count, 60)) for name, count in (("full", 7), ("cold", 6))]
        await asyncio.sleep(3)
        for name, count in (("full", 7), ("cold", 6)):
            row = await seen.row("queues", name)
            counted = row.get("waiting", 0) >= 5 and row["waiting"] + row["running"] == count
            faults += unless(counted, f"{name}: {row or 'no queue'}, and {count} were asked for")
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return faults


async def load_times(stage: Stage) -> Faults:
    """The time of a load does not count its wait for another's turn on the device."""
    async with stage.pool(model("left", load_s=3.0) + model("right", load_s=3.0), "cpu:4GiB") as seen:
        answers = await asyncio.gather(seen.ask("left"), seen.ask("right"))
        passed_s = max(answer.first_s for answer in answers) - min(answer.begun_s for answer in answers)
        took_s = [row["took_s"] for row in await seen.get("timeline") if row["action"] == "load"]
        apart = len(took_s) == 2 and sum(took_s) <= passed_s + 0.5
        return answered(answers) + unless(apart, f"in {passed_s:.1f} s one after the other took {took_s}")


async def weights(stage: Stage) -> Faults:
    """Replicas answer in proportion to the weights that the policy gives them."""
    services = model("shared", 0.3, step_s=0.05, strategy="min_replicas: 2, max_replicas: 2")
    services += model("neighbour", 0.5, step_s=0.05, strategy="min_replicas: 1, max_replicas: 1")
    async with stage.pool(services, "cpu:1GiB", "cpu:500MiB") as seen:
        up = await seen.until(lambda: seen.ready("shared") == 2 and seen.ready("neighbour") == 1, 20)
        faults = unless(up, "they did not come")
        told: Counter[str] = Counter()

        async def look() -> None:
            for _ in range(20):
                await asyncio.sleep(1.0)
                told.update(
                    {one["replica"]: one["weight"] for one in (await seen.tell("explain", what="shared"))["replicas"]}
                )

        load = seen.busy(["shared"] * 8 + ["neighbour"] * 6, 20, 20)
        answers, _ = await asyncio.gather(load, look())
        counts = Counter(answer.replica for answer in answers if answer.model == "shared")
        off = share_error(counts, told)
        text = f"answers {dict(counts)} by weights { ({name: round(value / 20, 2) for name, value in told.items()}) }"
        stage.say(f"weights: {text}")
        return faults + answered(answers) + unless(off <= WEIGHTS_OFF_MAX, text)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        newcomer,
        crowd,
        three_fit,
        cold_beside_idle,
        two_busy,
        idle_neighbours,
        tenants,
        lengths,
        equals,
        shapes,
        growth,
        surge,
        lowered,
        kept,
        fixed_kv,
        long_context,
        observed,
        advice,
        remedies,
        queues,
        load_times,
        weights,
    )
}
