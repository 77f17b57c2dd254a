"""One page with plots of a table of simulations: self-contained, readable without a network, bounded in size.

Per case: the table, cost against SLO as one point per policy, what each mechanism of ours is worth (where ablations ran),
and lines over time of one policy at a time. ``plotly`` is imported when a page is written.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ops.simulator.suite import ABLATION_PREFIX, BOUND, OURS, SLO_SHARE, Row, Table, ratio_to
from ops.simulator.types import SimModel

MODELS_MAX = 10
"""Lines of models in one plot; further ones are drawn as one."""
POINTS_MAX = 150
"""Per line and window."""
POLICIES_MAX = 24
PAGE_BYTES_MAX = 40_000_000
_GAP_MINUTES = 0.6
_TEXT_PLACES = ("top center", "bottom center", "middle right", "top right", "bottom right")
"""In turn, so that neighbours' names do not lie on each other."""
_COLOURS = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0", "#2d3e50",
)  # fmt: skip

ASSUMPTIONS = """
Every request has its SLO by itself: the first token within 2 s of its arrival and at most 100 ms per further token on
average. Attainment is the share of requests within both, per model; the goal is 99 % for every model. A request that
was refused, or not answered when the run ended, is outside.

GPU-hours are the time integral of devices that hold at least one replica in any state, loading and draining included. A
device that holds nothing costs nothing. Rows measure their windows only, each after a warm-up that is not counted.

Engines: one step decodes all running requests by one token and prefills waiting prompts up to a budget; it takes a
constant, and more per request and per token of context, and each prompt its own prefill time (coefficients fitted from
public measurements of an H100 with 72 GB usable). Every model and device is faster or slower than its profile by a
factor drawn from the seed, so no policy's arithmetic is exactly right.

Replicas of several models on one device share its memory by budgets and its time by turns: an engine that only decodes
lets its neighbours go first while its steps come often enough for its target, and while several have work 3 % of the
time is lost. So sharing a device gains nothing in throughput, which is conservative.

A load takes 3 s with the weights in the node's memory and 60 s from afar unless the row says otherwise; loads on one
device are serial, and loads from afar share their node's link. hpa always loads from afar: a new pod pulls its weights.

What decides is the scheduler's own code, the agents' own code and the replicas' own rule of what to pull; simulated are
time, engines and the bus. oracle knows all arrivals and is simulated like the rest. bound is proven: no schedule that
keeps 99 % of every model's requests within SLO can hold devices for less.
""".strip().split("\n\n")


def write_page(table: Table, path: Path) -> int:
    """Writes the page and returns its size in bytes.

    Raises:
        ConfigError: it cannot be written there.
    """
    from subjects.errors import ConfigError

    data = page(table).encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written ({error.strerror}); give another path") from None
    return len(data)


def check_plotly() -> None:
    """Says before the work what the page will need after it.

    Raises:
        ConfigError: it is not installed.
    """
    from subjects.errors import ConfigError

    if find_spec("plotly") is None:
        raise ConfigError("plotly is not installed: pip install 'carpool[research]'")


def page(table: Table) -> str:
    """The whole page."""
    from plotly.offline import get_plotlyjs

    labels = list(dict.fromkeys(row.case.label for row in table.rows))
    seeds = sorted({row.seed for row in table.rows})
    parts = [_section(table, label) for label in labels]
    assumptions = "".join(f"<li>{html.escape(text)}</li>" for text in ASSUMPTIONS)
    links = " · ".join(f'<a href="#{_anchor(label)}">{html.escape(label)}</a>' for label in labels)
    text = (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>Carpool simulation, seed {seeds[0] if seeds else '-'}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><main>"
        f"<h1>Carpool simulation</h1><p>seed {', '.join(map(str, seeds))} · {links}</p>"
        f"<details open><summary>What is assumed</summary><ul>{assumptions}</ul></details>"
        f"{''.join(parts)}</main></body></html>\n"
    )
    if len(text) > PAGE_BYTES_MAX:
        raise ValueError(f"the page would have {len(text)} bytes")
    return text


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1b1e23;background:#fff;margin:0}"
    "main{max-width:1240px;margin:0 auto;padding:1.5rem}h1{margin:0}h2{margin:2.5rem 0 .5rem;border-top:1px solid #ddd;"
    "padding-top:1rem}.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "table{font-size:13px}th,td{padding:.2rem .45rem;text-align:right;white-space:nowrap}"
    "th{border-bottom:1px solid #999;font-weight:600}"
    "th:first-child,td:first-child{text-align:left}tr.ours{background:#eef3ff;font-weight:600}td.bad{color:#b3261e}"
    "summary{cursor:pointer;font-weight:600}a{color:#2f5bd0}.error{color:#b3261e}"
)


def _anchor(label: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in label)


def _section(table: Table, label: str) -> str:
    rows = [row for row in table.rows if row.case.label == label]
    parts = [f'<section id="{_anchor(label)}"><h2>{html.escape(label)}</h2>', _setting(rows[0]), _html_table(table, rows)]
    parts += [f"<p class=error>{html.escape(row.policy)}: {html.escape(row.error)}</p>" for row in rows if row.error]
    if any(row.result for row in rows):
        parts.append(_embedded(_cost_against_slo(rows)))
    if any(row.policy.startswith(ABLATION_PREFIX) and row.result for row in rows):
        parts.append(_embedded(_ablations(rows)))
    drawn = [row for row in rows if row.series][:POLICIES_MAX]
    if drawn:
        parts.append(_embedded(_over_time(drawn)))
    return "".join([*parts, "</section>"])


def _setting(row: Row) -> str:
    """Pool, load times, windows, and the models by their costs."""
    from ops.simulator.cases import build

    workload = build(row.case)
    pool, ladder = workload.pool, workload.ladder
    measured_s = sum(window.end_s - window.begin_s for window in workload.windows)
    kinds: dict[tuple[object, ...], list[SimModel]] = {}
    for model in workload.models:
        kinds.setdefault((model.costs, model.weights_bytes, model.kv_bytes_per_token, model.gpus), []).append(model)
    rows = []
    for models in kinds.values():
        model, costs = models[0], models[0].costs
        names = ", ".join(one.name for one in models[:4]) + (f" and {len(models) - 4} more" if len(models) > 4 else "")
        split = sorted({workload.static_replicas.get(one.name, 0) for one in models})
        step = f"{1e3 * costs.step_const_s:.3g} + {1e3 * costs.step_request_s:.3g} batch"
        step += f" + {1e3 * costs.step_context_token_s:.2g} context"
        cells = (
            html.escape(names),
            f"{model.weights_bytes / 1e9:.3g}",
            str(model.gpus),
            f"{model.kv_bytes_per_token:,}",
            f"{1e3 * costs.prefill_token_s:.4g} L + {1e3 * costs.prefill_token2_s:.2g} L²",
            step,
            "-".join(map(str, split[:1] + split[-1:] if len(split) > 1 else split)),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(
        f"<th>{name}</th>"
        for name in ("models", "weights GB", "GPUs", "KV B/token", "prefill ms", "decode step ms", "static replicas")
    )
    return (
        f"<p>{pool.devices} devices {html.escape(pool.device_type)} in nodes of {pool.devices_per_node}; a load takes "
        f"{ladder.warm_s:g} s with the weights near and {ladder.cold_s:g} s from afar; {len(workload.windows)} "
        f"{'window' if len(workload.windows) == 1 else 'windows'}, {measured_s / 60:.0f} minutes measured.</p>"
        f"<details><summary>Models</summary><div class=scroll><table><tr>{head}</tr>{''.join(rows)}</table></div></details>"
    )


# ---------------------------------------------------------------------------------------------------------------- table

_HEAD = (
    "policy", "GPU-hours", "static / it", "GPUs", "SLO all", "SLO worst", "TTFT p50 s", "TTFT p99 s", "refused",
    "TPOT p99 s", "success", "loads", "busy", "useful", "to effect s", "to ready s",
)  # fmt: skip


def _html_table(table: Table, rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{name}</th>" for name in _HEAD)
    return f"<div class=scroll><table><tr>{head}</tr>{''.join(_html_row(table, row) for row in rows)}</table></div>"


def _html_row(table: Table, row: Row) -> str:
    ratio = ratio_to(table, row, "static", inverse=True)
    cells = [html.escape(row.policy), _n(row.gpu_hours, 2), _n(ratio, 2)]
    result = row.result
    if result is not None:
        cells += [
            str(result.gpus_owned), _share(result.slo_all), _share(result.slo_worst_model), _n(result.ttft_p50, 3),
            _n(result.ttft_p99, 2), _share(result.refused), _n(result.tpot_p99, 3), _share(result.success),
            str(result.switches), _share(result.utilisation), _share(result.useful_utilisation),
            _n(result.decision_to_effect_s, 3), _n(result.resource_move_s, 2),
        ]  # fmt: skip
    cells += ["-"] * (len(_HEAD) - len(cells))
    missed = result is not None and not row.meets_slo
    tds = "".join(
        f"<td{' class=bad' if missed and name == 'SLO worst' else ''}>{cell}</td>"
        for name, cell in zip(_HEAD, cells, strict=True)
    )
    return f"<tr{' class=ours' if row.policy == OURS else ''}>{tds}</tr>"


def _share(value: float) -> str:
    return f"{int(value * 10_000) / 100:.2f} %"


def _n(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    return "never" if value == float("inf") else f"{value:.{digits}f}"


# ---------------------------------------------------------------------------------------------------------------- plots


def _embedded(figure: Any) -> str:
    from plotly.io import to_html

    made: str = to_html(figure, include_plotlyjs=False, full_html=False, config={"displaylogo": False, "responsive": True})
    return made


def _layout(figure: Any, title: str, height: int) -> Any:
    figure.update_layout(
        title=title, height=height, template="plotly_white", margin={"l": 60, "r": 20, "t": 60, "b": 50}, colorway=_COLOURS
    )
    return figure


def _cost_against_slo(rows: Sequence[Row]) -> Any:
    """One point per policy: cost to the left, attainment of the worst model upwards."""
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for number, row in enumerate(row for row in rows if row.result is not None):
        assert row.result is not None
        ours = row.policy.startswith(OURS)
        figure.add_trace(
            Scatter(
                x=[row.result.gpu_hours],
                y=[100 * row.result.slo_worst_model],
                mode="markers+text",
                text=[row.policy],
                textposition=_TEXT_PLACES[number % len(_TEXT_PLACES)],
                marker={"size": 13 if row.policy == OURS else 9, "symbol": "diamond" if ours else "circle"},
                name=row.policy,
                hovertemplate="%{text}<br>%{x:.2f} GPU-hours<br>%{y:.2f} % of the worst model within SLO<extra></extra>",
            )
        )
    figure.add_hline(
        y=100 * SLO_SHARE, line_dash="dot", line_color="#888", annotation_text="goal 99 %", annotation_position="bottom left"
    )
    least = next((row.bound_gpu_hours for row in rows if row.policy == BOUND and row.bound_gpu_hours), None)
    if least is not None:
        figure.add_vline(x=least, line_dash="dash", line_color="#b3261e", annotation_text="bound")
    figure.update_xaxes(title="GPU-hours (less is better)", rangemode="tozero")
    figure.update_yaxes(title="worst model within SLO, %", range=[-3, 107])
    figure.update_layout(showlegend=False)
    return _layout(figure, "Cost against SLO", 460)


def _ablations(rows: Sequence[Row]) -> Any:
    """What each mechanism wins: cost and worst attainment without it, beside ours whole."""
    from plotly.graph_objects import Bar
    from plotly.subplots import make_subplots

    mine = [row for row in rows if row.result and (row.policy == OURS or row.policy.startswith(ABLATION_PREFIX))]
    names = [row.policy.removeprefix(ABLATION_PREFIX) if row.policy != OURS else "all of it" for row in mine]
    figure = make_subplots(rows=1, cols=2, subplot_titles=("GPU-hours", "worst model within SLO, %"))
    hours = [row.result.gpu_hours for row in mine if row.result]
    worst = [100 * row.result.slo_worst_model for row in mine if row.result]
    figure.add_trace(Bar(x=names, y=hours, showlegend=False), row=1, col=1)
    figure.add_trace(Bar(x=names, y=worst, showlegend=False), row=1, col=2)
    return _layout(figure, "What each mechanism wins (each bar: ours without it)", 380)


def _over_time(rows: Sequence[Row]) -> Any:
    """Lines of one policy at a time, chosen from a menu; windows stand side by side."""
    from plotly.subplots import make_subplots

    titles = (
        "ready replicas per model",
        "requests waiting for a replica",
        "share of requests within SLO, %",
        "devices that hold something",
        "share of their time in which they work, %",
    )
    figure = make_subplots(rows=len(titles), cols=1, shared_xaxes=True, vertical_spacing=0.04, subplot_titles=titles)
    owners: list[int] = []
    shown = next((index for index, row in enumerate(rows) if row.policy == OURS), 0)
    for index, row in enumerate(rows):
        for trace, at in _lines(row):
            trace.visible = index == shown
            figure.add_trace(trace, row=at, col=1)
            owners.append(index)
    buttons = [
        {"label": row.policy, "method": "update", "args": [{"visible": [owner == index for owner in owners]}]}
        for index, row in enumerate(rows)
    ]
    menu = {"buttons": buttons, "active": shown, "x": 0.0, "xanchor": "left", "y": 1.05, "yanchor": "bottom"}
    figure.update_layout(updatemenus=[menu], legend={"traceorder": "normal"})
    for begin_minutes, label in _windows(rows[shown]):
        figure.add_vline(x=begin_minutes, line_width=1, line_color="#ccc", row="all", col=1)
        figure.add_annotation(
            x=begin_minutes, y=1.0, yref="y domain", text=label, showarrow=False, xanchor="left", yanchor="top"
        )
    figure.update_xaxes(
        title="minutes (windows side by side, each begins with a warm-up that is not measured)", row=5, col=1
    )
    figure.update_yaxes(rangemode="tozero")
    for row_number in (3, 5):
        figure.update_yaxes(range=[0, 104], row=row_number, col=1)
    figure = _layout(figure, "", 1120)
    figure.update_layout(margin={"t": 90})
    return figure


def _windows(row: Row) -> list[tuple[float, str]]:
    """Where each window begins on the page's time axis, and when that was in the trace."""
    found: list[tuple[float, str]] = []
    at = 0.0
    for series in row.series:
        if series.time_s:
            found.append((at, f"{round(series.time_s[0] / 3600, 2):g} h"))
            at += (series.time_s[-1] - series.time_s[0]) / 60 + _GAP_MINUTES
    return found


def _lines(row: Row) -> list[tuple[Any, int]]:
    """The traces of one policy and the subplot of each."""
    from plotly.graph_objects import Scatter

    models = row.series[0].models
    chosen, rest = _chosen(row)
    x: list[float | None] = []
    ready: dict[str, list[float | None]] = {name: [] for name in chosen}
    waiting: dict[str, list[float | None]] = {name: [] for name in chosen}
    others_ready: list[float | None] = []
    others_waiting: list[float | None] = []
    gpus: list[float | None] = []
    busy: list[float | None] = []
    offset = 0.0
    for series in row.series:
        if not series.time_s:
            continue
        every = max(1, -(-len(series.time_s) // POINTS_MAX))
        for at in range(0, len(series.time_s), every):
            x.append(round(offset + (series.time_s[at] - series.time_s[0]) / 60, 3))
            for name in chosen:
                ready[name].append(series.ready[at][models.index(name)])
                waiting[name].append(series.waiting[at][models.index(name)])
            others_ready.append(sum(series.ready[at][models.index(name)] for name in rest))
            others_waiting.append(sum(series.waiting[at][models.index(name)] for name in rest))
            gpus.append(series.gpus[at])
            span = series.utilisation[at : at + every]
            busy.append(round(100 * sum(span) / len(span), 1))
        for line in (x, gpus, busy, others_ready, others_waiting, *ready.values(), *waiting.values()):
            line.append(None)  # No line from one window to the next.
        offset += (series.time_s[-1] - series.time_s[0]) / 60 + _GAP_MINUTES
    if rest:
        ready[f"{len(rest)} more"], waiting[f"{len(rest)} more"] = others_ready, others_waiting
    found: list[tuple[Any, int]] = []
    for number, name in enumerate(ready):
        colour = _COLOURS[number % len(_COLOURS)]
        style = {"mode": "lines", "line": {"color": colour, "shape": "hv", "width": 1.5}, "name": name, "legendgroup": name}
        found.append((Scatter(x=x, y=ready[name], **style), 1))
        found.append((Scatter(x=x, y=waiting[name], showlegend=False, **style), 2))
    found += [(line, 3) for line in _attained(row, chosen)]
    for line, at in ((gpus, 4), (busy, 5)):
        dark = {"shape": "hv", "color": "#444", "width": 1.5}
        found.append((Scatter(x=x, y=line, mode="lines", line=dark, name=row.policy, showlegend=False), at))
    return found


def _chosen(row: Row) -> tuple[list[str], list[str]]:
    """Models with a line of their own (those with most replicas over the run), and the others."""
    models = row.series[0].models
    if len(models) <= MODELS_MAX:
        return list(models), []
    total = {
        name: sum(sample[number] for series in row.series for sample in series.ready) for number, name in enumerate(models)
    }
    most = sorted(models, key=lambda name: (-total[name], name))[:MODELS_MAX]
    return [name for name in models if name in most], [name for name in models if name not in most]


def _attained(row: Row, chosen: Sequence[str]) -> list[Any]:
    from plotly.graph_objects import Scatter

    models = row.series[0].models
    lines: list[Any] = []
    for number, name in enumerate(chosen):
        x: list[float | None] = []
        y: list[float | None] = []
        offset = 0.0
        for series, attained in zip(row.series, row.attainment, strict=False):
            if not series.time_s:
                continue
            for time_s, shares in zip(attained.time_s, attained.share, strict=True):
                share = shares[models.index(name)]
                if share is not None:
                    x.append(round(offset + (time_s - series.time_s[0]) / 60, 3))
                    y.append(round(100 * share, 1))
            x.append(None)
            y.append(None)
            offset += (series.time_s[-1] - series.time_s[0]) / 60 + _GAP_MINUTES
        colour = _COLOURS[number % len(_COLOURS)]
        lines.append(
            Scatter(
                x=x, y=y, mode="lines", line={"color": colour, "width": 1.5}, name=name, legendgroup=name, showlegend=False
            )
        )
    return lines
