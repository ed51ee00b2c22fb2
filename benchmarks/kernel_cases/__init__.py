"""The kernels that `benchmarks.kernels` times, with their inputs, references and costs."""

from benchmarks.kernel_cases import attend, drafting, draws, layers, step
from benchmarks.kernel_cases.bench import Bench, Case, Errors, Probe

CASES = [*layers.CASES, *attend.CASES, *step.CASES, *draws.CASES, *drafting.CASES]

__all__ = ["CASES", "Bench", "Case", "Errors", "Probe"]
