"""Shared vocabulary and algorithms of Slipstream.

Nothing in this package imports `services` or `gateway`. `models`, `layers`, `noise` and `sampling`
need torch; everything else here may be imported by a torch-free process.
"""

__version__ = "0.1.0"
