"""From answers to figures: throughput, latency, and what drafting did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from slipstream.cli.client import Answer

_QUANTILES = (50, 95, 99)


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile (0 to 100), linear between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def tau(answers: Iterable[Answer]) -> float | None:
    """(emitted tokens - 1) / verify steps, over all steps; None without a step."""
    drafted = [answer for answer in answers if answer.steps]
    steps = sum(answer.steps for answer in drafted)
    return sum(answer.tokens - 1 for answer in drafted) / steps if steps else None


def accepted_histogram(answers: Iterable[Answer]) -> dict[int, int]:
    """Verify steps by the number of draft tokens accepted."""
    counts = Counter(count for answer in answers for count in answer.accepted)
    return dict(sorted(counts.items()))


def acceptance_by_depth(answers: Iterable[Answer]) -> list[float]:
    """Item d - 1: the share of the steps with a draft whose accepted path reached depth d."""
    reached = [
        accepted
        for answer in answers
        for accepted, nodes in zip(answer.accepted, answer.nodes, strict=False)
        if nodes > 1
    ]
    deepest = max(reached, default=0)
    return [sum(a >= depth for a in reached) / len(reached) for depth in range(1, deepest + 1)]


@dataclass(frozen=True, slots=True)
class Run:
    """The measured phase at one concurrency.

    Attributes:
        seconds: from the first request's start to the last answer's end.
        errors: messages of failed requests.
    """

    concurrency: int
    seconds: float
    answers: Sequence[Answer]
    errors: Sequence[str]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, Any]:
        """Everything known of this run, ready for JSON; times in ms."""
        answers = self.answers
        nodes = [count for answer in answers for count in answer.nodes]
        per_answer = [answer.tau for answer in answers if answer.tau is not None]
        return {
            "concurrency": self.concurrency,
            "requests": len(answers) + len(self.errors),
            "errors": len(self.errors),
            "error_messages": sorted(set(self.errors))[:5],
            "seconds": round(self.seconds, 3),
            "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
            "output_tokens": self.tokens,
            "output_tok_s": round(self.tokens_per_second, 2),
            "ttft_ms": _quantiles(answer.ttft for answer in answers),
            "time_per_token_ms": _quantiles(answer.time_per_token for answer in answers),
            "chunk_gap_ms": _quantiles(gap for answer in answers for gap in answer.gaps),
            "steps": sum(answer.steps for answer in answers),
            "tau": _rounded(tau(answers)),
            "tau_mean_of_answers": _rounded(sum(per_answer) / len(per_answer))
            if per_answer
            else None,
            "accepted_histogram": {str(k): v for k, v in accepted_histogram(answers).items()},
            "acceptance_by_depth": [round(share, 4) for share in acceptance_by_depth(answers)],
            "mean_nodes": _rounded(sum(nodes) / len(nodes)) if nodes else None,
            "finish": dict(Counter(answer.finish for answer in answers)),
        }


def throughput_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """One line per concurrency."""
    table = Table(title="throughput and latency", title_justify="left")
    headings = ["streams", "errors", "tok/s", "TTFT ms\np50/p95/p99", "ms per token\np50/p95"]
    for heading in (*headings, "tau", "nodes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in summaries:
        ttft, per_token = run["ttft_ms"], run["time_per_token_ms"]
        table.add_row(
            str(run["concurrency"]),
            f"{run['errors']} of {run['requests']}",
            _show(run["output_tok_s"], 1),
            " / ".join(_show(ttft[f"p{q}"], 0) for q in _QUANTILES),
            " / ".join(_show(per_token[f"p{q}"], 1) for q in (50, 95)),
            _show(run["tau"], 3),
            _show(run["mean_nodes"], 1),
        )
    return table


def acceptance_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """Per number of draft tokens: steps that accepted so many, and the share that reached it."""
    table = Table(title="draft tokens accepted per step", title_justify="left")
    table.add_column("tokens", justify="right")
    for run in summaries:
        table.add_column(f"steps ({run['concurrency']} streams)", justify="right")
        table.add_column("reached", justify="right")
    deepest = max((int(k) for run in summaries for k in run["accepted_histogram"]), default=0)
    for depth in range(deepest + 1):
        cells = [str(depth)]
        for run in summaries:
            shares = run["acceptance_by_depth"]
            reached = f"{shares[depth - 1]:.1%}" if 0 < depth <= len(shares) else ""
            cells += [str(run["accepted_histogram"].get(str(depth), 0)), reached]
        table.add_row(*cells)
    return table


def _quantiles(seconds: Iterable[float | None]) -> dict[str, float | None]:
    known = [value * 1e3 for value in seconds if value is not None]
    return {f"p{q}": _rounded(percentile(known, q)) for q in _QUANTILES}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _show(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
