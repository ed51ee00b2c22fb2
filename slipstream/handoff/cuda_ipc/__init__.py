"""The handoff on GPUs of one node: messages lie in memory that both processes map, flags in host
memory say what is ready, and streams wait for them; no host is in the loop.

The target allocates and exports (`Export`), the draft maps (`Mapper`). A session uses one of a few
sets of rings and flags (`Lane`); whether memory and flags work between two processes is probed when
it is connected. On a CPU the same classes work with the calling thread in place of a stream.
"""

from slipstream.handoff.cuda_ipc.draft_end import CudaDraftEnd
from slipstream.handoff.cuda_ipc.export import Export
from slipstream.handoff.cuda_ipc.mapper import Mapper, Mapping
from slipstream.handoff.cuda_ipc.target_end import CudaTargetEnd

__all__ = ["CudaDraftEnd", "CudaTargetEnd", "Export", "Mapper", "Mapping"]
