"""Prometheus metrics that cost little where they are taken: at every step, for every request.

The types here are written by one thread and read by the same one, so they need no lock; they are
turned into Prometheus samples only when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

PREFIX = "slipstream_"

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of what `render` returns."""


class Histogram(Collector):
    """Counts of observations by upper bound; a bucket's own bound belongs to it."""

    __slots__ = ("_bounds", "_counts", "_help", "_name", "_sum")

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = PREFIX + name
        self._help = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """The histogram as Prometheus has it: cumulative counts."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


class LabelledCounter(Collector):
    """A counter per combination of label values."""

    __slots__ = ("_help", "_labels", "_name", "_values")

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self._name = PREFIX + name
        self._help = help_text
        self._labels = tuple(labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1, *labels: str) -> None:
        """Adds to the counter of these label values."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def collect(self) -> Iterable[Metric]:
        """One sample per combination seen."""
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


def gauge(name: str, help_text: str, value: float) -> Metric:
    """A gauge with its present value."""
    return GaugeMetricFamily(PREFIX + name, help_text, value=value)


def counter(name: str, help_text: str, value: float) -> Metric:
    """A counter that somebody else keeps."""
    return CounterMetricFamily(PREFIX + name, help_text, value=value)


def counters(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Counters that somebody else keeps, one per value of `label`."""
    family = CounterMetricFamily(PREFIX + name, help_text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def gauges(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Gauges with their present values, one per value of `label`."""
    family = GaugeMetricFamily(PREFIX + name, help_text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def registry(collectors: Iterable[Collector]) -> CollectorRegistry:
    """A registry of `collectors` and of this process's own memory, CPU time and file handles."""
    made = CollectorRegistry(auto_describe=False)
    ProcessCollector(namespace=PREFIX.rstrip("_"), registry=made)
    for collector in collectors:
        made.register(collector)
    return made


def render(metrics: CollectorRegistry) -> bytes:
    """All metrics in Prometheus's text format; its media type is CONTENT_TYPE."""
    return generate_latest(metrics)
