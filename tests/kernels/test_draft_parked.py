"""A session that waits for its target holds up no other one, and is right when it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.parked_draft import Draft, proof


@pytest.mark.slow
def test_a_parked_session_holds_up_no_other(tmp_path: Path, device: torch.device) -> None:
    draft = Draft(tmp_path, device)
    watch = proof(draft)
    draft.close()
    assert any(name == "detach of another session" for _, name in watch.calls)
