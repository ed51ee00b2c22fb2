"""A draft's stream is parked on a context that does not come; all else is driven."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.parked_draft import Draft, proof
from tests.gpu.test_nothing_loads import loads

pytestmark = pytest.mark.gpu

LIMIT_S = 0.05


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return Draft(tmp_path, torch.device("cuda", 0))


def test_nothing_blocks_while_a_session_is_parked(draft: Draft) -> None:
    seconds, name = proof(draft).slowest()
    draft.close()
    assert seconds < LIMIT_S, f"{name} took {1e3 * seconds:.1f} ms"


def test_nothing_is_loaded_meanwhile(draft: Draft) -> None:
    with loads() as found:
        proof(draft)
    draft.close()
    assert not found, f"{len(found)} loads, the first: {found[:5]}"
