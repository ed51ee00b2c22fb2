"""One repair of Triton's interpreter: loop bounds that were read from memory.

It makes a Python int of them by `int(array)`, which NumPy from 2.4 on refuses for arrays of one
element that have a dimension.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def repair() -> None:
    """Lets `range` take tensors as bounds in interpreted kernels; may be called again."""
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "repaired", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.repaired = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
