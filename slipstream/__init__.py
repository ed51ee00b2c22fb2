"""Shared vocabulary and algorithms of Slipstream.

Nothing in this package imports `services` or `gateway`. `models`, `layers`, `noise` and `sampling`
need torch; everything else here may be imported by a torch-free process.
"""

import os

# gRPC's core writes every GOAWAY to stderr otherwise; it reads this when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
