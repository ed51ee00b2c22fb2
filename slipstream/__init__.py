"""Shared vocabulary and algorithms of Slipstream.

Nothing in this package imports `services` or `gateway`. Modules that a torch-free process may import: `errors`,
`settings`, `wire`, `serving`, `channels`, `metrics`, `log`, `speculative`, `tree` (its builders and arrays), `v1`
and `cli`. `models`, `layers` and `sampling` need torch.
"""

__version__ = "0.1.0"
