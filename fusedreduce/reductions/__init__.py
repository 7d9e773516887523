"""One bucket's way through a step: launch when its gradients are ready, finish when its collective is done.

    PackedReduction  pack -> all-reduce -> unpack, two launches: the wire is ours
    HookedReduction  copy -> a comm hook (torch's contract) -> copy: the hook owns scale, cast and collective
    SparseReduction  one sparse gradient: divide -> sparse all-reduce (or the hook)

A reduction keeps the tensors it works on until it is finished, and writes gradients in `finish` alone: when a step
fails, a bucket's gradients are all reduced or all still local. (With gradients as views of the wire they are the
wire, and a collective that fails leaves them divided.)
"""

from .hooked import CommHook, HookedReduction
from .members import Members, Reduction
from .packed import PackedReduction
from .sparse import SparseReduction
from .sparse_kinds import SparseKinds

__all__ = [
    "CommHook",
    "HookedReduction",
    "Members",
    "PackedReduction",
    "Reduction",
    "SparseKinds",
    "SparseReduction",
]
