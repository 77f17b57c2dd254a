"""``carpool explain``, ``lock``, ``unlock``, ``drain`` and ``mode``: what people ask of the scheduler and tell it."""

from __future__ import annotations

import math
from typing import Any

import click

from ops.cli_common import Pool, clock, on_pool
from profiles.service import REPLICAS_MAX

MODES = ("observe", "advise", "act", "default")


def _one_of(**given: str | None) -> tuple[str, dict[str, Any]]:
    """The only thing that was named, for people and for the scheduler."""
    named = {what: name for what, name in given.items() if name}
    if len(named) != 1:
        options = [what.upper() if what == "model" else f"--{what}" for what in given]
        raise click.UsageError(f"name one thing: {', '.join(options[:-1])} or {options[-1]}")
    ((what, name),) = named.items()
    return (name if what == "model" else f"{what} {name}"), {what: name}


_device = click.option("--device", metavar="WORKER/DEVICE", help="A device, as `carpool get devices` shows it.")
_replica = click.option("--replica", metavar="ID", help="A replica, as `carpool get replicas` shows it.")
_worker = click.option("--worker", metavar="NAME", help="A worker with all its devices.")


@click.command(short_help="Keep the scheduler's hands off a model, device or replica.")
@click.argument("model", required=False)
@_device
@_replica
@on_pool
def lock(pool: Pool, model: str | None, device: str | None, replica: str | None) -> None:
    """Keep the scheduler's hands off a model, a device or a replica, until `carpool unlock`.

    Nothing automatic starts, stops or changes a locked model's replicas; nothing comes to or goes from a locked device.
    What you order yourself (unload, drain) is still done. Locks outlive restarts of every part.

    \b
    carpool lock smollm2
    carpool lock --device gpu-host-1/gpu0
    carpool lock --replica smollm2-3-1-5be0cd19c1
    """
    name, argument = _one_of(model=model, device=device, replica=replica)
    result = pool.ask("lock", **argument)
    pool.tell(result, lambda: f"{name}: locked" if result["changed"] else f"{name}: was locked already")


@click.command(short_help="Give a model, device, replica or worker back to the scheduler.")
@click.argument("model", required=False)
@_device
@_replica
@_worker
@on_pool
def unlock(pool: Pool, model: str | None, device: str | None, replica: str | None, worker: str | None) -> None:
    """Give a locked model, device or replica back to the scheduler, or a drained device or worker back to work.

    \b
    carpool unlock smollm2
    carpool unlock --device gpu-host-1/gpu0
    carpool unlock --worker gpu-host-1
    """
    name, argument = _one_of(model=model, device=device, replica=replica, worker=worker)
    result = pool.ask("unlock", **argument)
    pool.tell(result, lambda: f"{name}: unlocked" if result["changed"] else f"{name}: was neither locked nor drained")


def _a_number(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    # click's range lets NaN pass, which no comparison refuses.
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number of seconds; give 0 to 3600, such as 60")
    return value


@click.command(short_help="Empty a worker, a device or a replica within a bound.")
@_worker
@_device
@_replica
@click.option(
    "--bound-s",
    type=click.FloatRange(0, 3600),
    callback=_a_number,
    help="Seconds that running requests may take to finish; then they go on elsewhere. Default: the scheduler's.",
)
@on_pool
def drain(pool: Pool, worker: str | None, device: str | None, replica: str | None, bound_s: float | None) -> None:
    """Empty a worker, a device or a replica: no new requests, running ones finish within the bound, then it is unloaded.

    Nothing is placed on a drained worker or device until `carpool unlock`. A drain wins over locks and pins.

    \b
    carpool drain --worker gpu-host-1 --bound-s 60
    carpool drain --device gpu-host-1/gpu0
    carpool drain --replica smollm2-3-1-5be0cd19c1 --bound-s 0
    """
    name, argument = _one_of(worker=worker, device=device, replica=replica)
    result = pool.ask("drain", **argument, bound_s=bound_s)
    count, running = result["replicas"], result["running"]
    pool.tell(
        result,
        lambda: (
            f"{name}: draining, {count} replica{'' if count == 1 else 's'} with {running} running "
            f"request{'' if running == 1 else 's'}"
        ),
    )


@click.command(short_help="Say how far the scheduler may go with a model.")
@click.argument("model")
@click.argument("mode", type=click.Choice(MODES))
@on_pool
def mode(pool: Pool, model: str, mode: str) -> None:
    """Say how far the scheduler's policy may go with a model: observe, advise or act.

    In `advise` what it would do and why appears as `advice` in `carpool get timeline`. Requests wake the model in every
    mode. `default` gives the service's own mode its say again.

    \b
    carpool mode smollm2 advise
    carpool mode smollm2 act
    """
    result = pool.ask("mode", model=model, mode=mode)
    pool.tell(result, lambda: f"{result['model']}: mode {result['mode']}")


@click.command(short_help="Tell why a model, a scale action or a request is where it is.")
@click.argument("what")
@on_pool
def explain(pool: Pool, what: str) -> None:
    """Tell why. For a model: what it has, what was decided and why, what it waits for and what would change it. For a scale
    action (by its name or an operation's id): its steps with times. For a request id: its waits, replicas and attempts.

    \b
    carpool explain smollm2
    carpool explain 3-12
    carpool explain op-3-41
    carpool explain gateway-5be0cd19c1-17
    """
    result = pool.ask("explain", what=what)
    pool.tell(result, lambda: "\n".join(_told(result)))


# ------------------------------------------------------------------------------------------------------------ for people


def _told(result: dict[str, Any]) -> list[str]:
    match result["explains"]:
        case "model":
            return _model(result)
        case "transaction":
            return _transaction(result)
        case _:
            return _request(result)


def _model(result: dict[str, Any]) -> list[str]:
    most = "as many as fit" if result["max_replicas"] >= REPLICAS_MAX else str(result["max_replicas"])
    limits = f"{result['min_replicas']} to {most} replicas"
    lines = [
        f"{result['model']}: {result['state']}, class {result['sla_class']}, {limits}, mode {result['mode']}",
        f"  needs      {result['needs']}",
        f"  deployment {result.get('deployment', '-')}",
        f"  demand     {result['waiting']} waiting (oldest {result['oldest_wait_s']:.1f} s), {result['running']} running"
        + (f", a newcomer waits about {result['estimated_wait_s']:.0f} s" if result["estimated_wait_s"] else ""),
    ]
    for replica in result["replicas"]:
        held = f"; stays: {replica['held_by']}" if replica["held_by"] else ""
        lines.append(
            f"  replica    {replica['replica']} on {replica['where']}: {replica['state']} for {replica['state_s']:.0f} s, "
            f"{replica['running']} of {replica['slots']} running{held}"
        )
    for title, key in (("why", "why"), ("costs", "costs"), ("waits for", "waits_for"), ("changes by", "would_change")):
        lines += [f"  {title if not number else '':<10} {line}" for number, line in enumerate(result.get(key, ()))]
    for number, entry in enumerate(result["actions"]):
        told = f"{clock(entry['at_unix_s'])} {entry['action']} on {entry['device']}: {entry['reason']}"
        outcome = f" ({entry['outcome']}, {entry['took_s']:.1f} s)" if entry["outcome"] else " (under way)"
        lines.append(f"  {'actions' if not number else '':<10} {told}{outcome}")
    for number, one in enumerate(result["transactions"]):
        lines.append(
            f"  {'see also' if not number else '':<10} carpool explain {one['transaction']}: {one['kind']}, {one['outcome']}"
        )
    lines.append(f"  next look  in {result['next_look_s']:.1f} s, or when something happens")
    return lines


def _transaction(result: dict[str, Any]) -> list[str]:
    took = f" after {result['took_s']:.2f} s" if result["took_s"] is not None else ""
    lines = [
        f"{result['transaction']}: {result['kind']} {result['model']} on {result['where']}, {result['outcome']}{took}",
        f"  begun      {clock(result['begun_unix_s'])}",
        f"  why        {result['reason']}",
    ]
    for step in result["steps"]:
        took = f" in {step['took_s']:.2f} s" if step["took_s"] is not None else ""
        lines.append(f"  +{step['sent_s']:7.2f} s  {step['what']}: {step['outcome']}{took} ({step['operation']})")
    return lines


def _request(result: dict[str, Any]) -> list[str]:
    end = f", status {result['status']}" if result["status"] else ""
    code = f" {result['code']}" if result["code"] else ""
    lines = [
        f"{result['request']}: {result['state']}{end}{code} after {result['age_s']:.2f} s",
        f"  model      {result['model']}, class {result['sla_class']}, lane {result['lane']}",
        f"  arrived    {clock(result['arrived_unix_s'])}",
        f"  tokens     {result['input_tokens']} in, {result['expected_output_tokens']} expected out"
        + (f", {result['output_tokens']} out" if result["output_tokens"] is not None else ""),
    ]
    for attempt in result["attempts"]:
        lost = ", then that replica was lost" if attempt["lost"] else ""
        kept = (
            f", where {tokens} tokens of the prompt were expected to be" if (tokens := attempt.get("prefix_tokens")) else ""
        )
        lines.append(
            f"  attempt {attempt['attempt']}  waited {attempt['waited_s']:.2f} s, ran on {attempt['replica']}{kept}{lost}"
        )
    if result["first_output_s"] is not None:
        lines.append(f"  first out  after {result['first_output_s']:.2f} s")
    if "waits_for" in result:
        lines.append(f"  its model  {result['model']} is {result['model_state']}")
        lines += [f"  {'' if number else 'waits for':<10} {line}" for number, line in enumerate(result["waits_for"])]
    return lines
