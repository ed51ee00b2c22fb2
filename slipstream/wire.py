"""What the wire speaks in, beside the protos: versions, limits, element types."""

from __future__ import annotations

from slipstream.v1 import common_pb2 as pb

PROTOCOL = 3
"""Version of everything in `protos/`; Hello refuses another."""

MAX_FRAME = 1 << 20
"""Most payload bytes of one context frame."""

MAX_NODES = 256
"""Most rows of one slot in one plan."""

DTYPES: dict[str, pb.DType.ValueType] = {
    "float32": pb.DTYPE_F32,
    "bfloat16": pb.DTYPE_BF16,
    "float16": pb.DTYPE_F16,
}
"""Element types by the name that torch gives them."""

DTYPE_NAMES = {number: name for name, number in DTYPES.items()}

ITEM_SIZE: dict[pb.DType.ValueType, int] = {pb.DTYPE_F32: 4, pb.DTYPE_BF16: 2, pb.DTYPE_F16: 2}
"""Bytes of one element."""
