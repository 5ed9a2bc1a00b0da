"""Medians, ratios and the tables that a benchmark prints."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.cells import Cell, Plan, Results
from benchmarks.servers import RunningServer

OURS, PEER = "tpugate", "vllm"
TIMES = {
    "TTFT p50": "ttft_p50_ms",
    "TTFT p99": "ttft_p99_ms",
    "between tokens p50": "inter_token_p50_ms",
    "between tokens p99": "inter_token_p99_ms",
}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def median(cells: Sequence[Cell], name: str) -> float:
    """Of one figure over the rounds."""
    values: list[float] = [getattr(cell.figures, name) for cell in cells]
    return round(statistics.median(values), 1)


def throughput_table(plan: Plan, results: Results, scenario: str) -> str:
    """One row for each number of clients: ours, and beside it the peer if there is one."""
    servers = list(dict.fromkeys(key.rsplit("/", 1)[1] for key in results.cells))
    has_ratio = {OURS, PEER} <= set(servers)
    header = ["clients", *(f"{server} tokens/s" for server in servers)]
    header += ["ratio"] if has_ratio else []
    header += [f"{what} ms, {' / '.join(servers)}" for what in TIMES]
    header += ["errors"]
    rows = []
    for clients in plan.clients[scenario]:
        cells = {server: results.of(scenario, clients, server) for server in servers}
        if all(cells.values()):
            rows.append([clients, *_row(cells, has_ratio=has_ratio)])
    return table(header, rows)


def _row(cells: dict[str, list[Cell]], *, has_ratio: bool) -> list[object]:
    rates = {server: median(rounds, "output_tokens_per_s") for server, rounds in cells.items()}
    row: list[object] = list(rates.values())
    if has_ratio:
        row.append(f"{ratio(cells):.2f}")
    for name in TIMES.values():
        row.append(" / ".join(f"{median(rounds, name):g}" for rounds in cells.values()))
    row.append(sum(cell.figures.num_errors for rounds in cells.values() for cell in rounds))
    return row


def ratio(cells: dict[str, list[Cell]]) -> float:
    """Our median throughput over the peer's."""
    ours, peer = (median(cells[name], "output_tokens_per_s") for name in (OURS, PEER))
    return ours / (peer or 1.0)


def steps_table(plan: Plan, results: Results) -> str:
    """What our engine's steps cost in each scenario; the median round by host work."""
    rows = []
    for scenario, levels in plan.clients.items():
        for clients in levels:
            cells = [
                c for server in (OURS, "server") for c in results.of(scenario, clients, server)
            ]
            told = sorted((c.steps for c in cells if c.steps), key=lambda steps: steps.host_ms)
            if told:
                s = told[len(told) // 2]
                row = [scenario, clients, s.steps, s.device_ms, s.host_ms]
                rows.append([*row, s.padding_ratio, s.cached_ratio])
    header = ["scenario", "clients", "steps", "device ms a step", "host ms a step"]
    return table([*header, "padding", "prompt tokens from cache"], rows)


def whole(plan: Plan, results: Results) -> str:
    """All tables of a run of `benchmarks.serve`, whatever of it is finished."""
    parts = []
    for scenario in plan.clients:
        parts += [f"**{scenario}**", throughput_table(plan, results, scenario)]
    parts.append(steps_table(plan, results))
    if results.starts:
        parts.append(table(["start", "seconds until ready"], results.starts.items()))
    if results.memory:
        parts.append(table(["process", "peak memory, MiB"], results.memory.items()))
    if results.idle:
        parts.append(table(["server", "cores busy while idle"], results.idle.items()))
    return "\n\n".join(parts)


def memory_table(servers: Sequence[RunningServer]) -> str:
    rows = [
        [server.recipe.name, row.process, row.peak_rss_mib]
        for server in servers
        for row in server.peak_memory()
    ]
    return table(["server", "process", "peak RSS MiB"], rows)
