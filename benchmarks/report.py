"""Medians, ratios and the tables that a benchmark prints."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.closed_loop import Figures
from benchmarks.servers import RunningServer

SHOWN = {
    "output tokens/s": "output_tokens_per_s",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "inter-token p50 ms": "inter_token_p50_ms",
    "inter-token p99 ms": "inter_token_p99_ms",
}
Runs = Mapping[str, Mapping[int, Sequence[Figures]]]
"""Server name → number of clients → one entry a round."""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def median(figures: Sequence[Figures], name: str) -> float:
    values: list[float] = [getattr(entry, name) for entry in figures]
    return round(statistics.median(values), 2)


def throughput_table(runs: Runs) -> str:
    """One row per server and number of clients, medians over the rounds."""
    rows = [
        [
            server,
            num_clients,
            *(median(figures, name) for name in SHOWN.values()),
            sum(entry.num_errors for entry in figures),
        ]
        for server, levels in runs.items()
        for num_clients, figures in levels.items()
    ]
    return table(["server", "clients", *SHOWN, "errors"], rows)


def ratios(runs: Runs, ours: str, peer: str) -> dict[int, dict[str, float]]:
    """`ours` divided by `peer`, of medians; more is better for tokens/s, less for the times."""
    return {
        num_clients: {
            name: round(median(figures, name) / (median(runs[peer][num_clients], name) or 1.0), 3)
            for name in SHOWN.values()
        }
        for num_clients, figures in runs[ours].items()
    }


def ratio_table(runs: Runs, ours: str, peer: str) -> str:
    rows = [
        [num_clients, *(f"{row[name]:.2f}" for name in SHOWN.values())]
        for num_clients, row in ratios(runs, ours, peer).items()
    ]
    return table([f"clients ({ours} / {peer})", *SHOWN], rows)


def memory_table(servers: Sequence[RunningServer]) -> str:
    rows = [
        [server.recipe.name, row.process, row.peak_rss_mib]
        for server in servers
        for row in server.peak_memory()
    ]
    return table(["server", "process", "peak RSS MiB"], rows)
