"""RMS normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32.

    A weight of more than one dimension (heads, head_dim) has a vector for each head.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self._shape = (weight.shape[-1],)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1:
            return F.rms_norm(x, self._shape, self.weight, self.eps)
        return F.rms_norm(x, self._shape, None, self.eps) * self.weight
