"""The checks of `fusedreduce doctor` on one process: versions, devices, and the kernels' results.

The kernels are checked by packing (encoding) and unpacking one small bucket per wire, and comparing every bit with the
reference on CPU. On a GPU that compiles the kernels; on CPU it runs the torch operators that replace them there.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from fusedreduce.kernels import counting, dispatch, encoded, reference, reference_encoded
from fusedreduce.kernels.encoded_table import EncodedTable
from fusedreduce.kernels.encodings import ENCODINGS, Encoding
from fusedreduce.kernels.table import ChunkTable, PointerTable
from fusedreduce.planning.layout import aligned_layout, block_layout
from fusedreduce.trace.recorder import place as here
from fusedreduce.wires import PLAIN_WIRES, wire_dtype

from .report import hardware, one_line, versions

# Pairs of torch and triton with which all tests run.
TESTED = (("2.13.0", "3.7.1"),)
Status = Literal["ok", "note", "warning", "broken"]
DRIVER = Path("/proc/driver/nvidia/version")
_SHOWN = ("python", "torch", "triton", "numpy", "fusedreduce")
_NUMELS = (3, 5000, 1, 1024, 0, 17)
_MIXED = (torch.float32, torch.bfloat16, torch.float16)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIVISOR, _SCALE = 3.0, 0.7


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        status: "ok", "note", "warning" or "broken", which makes the exit status 1.
        about: one word: the part of the report that it belongs to.
        text: what was found.
        action: what the user should do; "": nothing.
        write: lines to copy, which follow `action`.
    """

    status: Status
    about: str
    text: str
    action: str = ""
    write: Sequence[str] = ()


def facts() -> dict[str, Any]:
    """Versions and devices of this process, as plain values for JSON."""
    found = versions()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        **here(),  # host, network and boot: ranks in namespaces of their own do not talk through memory alone
        "versions": {name: found[name] for name in _SHOWN},
        "cores": len(os.sched_getaffinity(0)),
        "affinity": hex(sum(1 << core for core in os.sched_getaffinity(0))),  # as taskset writes it
        "processor": None if gpus else hardware("cpu", 1),
        "gpus": [_gpu(index) for index in range(gpus)],
        "driver": _driver(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus and dist.is_nccl_available() else None,
    }


def machine_findings(known: dict[str, Any]) -> list[Finding]:
    """Findings about the versions and devices that `facts` returned."""
    return [*_of_versions(known["versions"]), *_of_devices(known)]


def check_kernels(device: torch.device) -> Finding:
    """Checks that pack and unpack give the right bits on a device, for every wire."""
    began = time.monotonic()
    checks: list[tuple[str, Sequence[torch.dtype], Callable[[], str]]] = []
    for wire in PLAIN_WIRES:
        sent = wire_dtype(wire) or torch.float32
        checks.append((wire, _MIXED, functools.partial(_compare, device, sent, _MIXED)))
    fp64 = (torch.float64,)
    checks.append(("native", fp64, functools.partial(_compare, device, torch.float64, fp64)))
    # Where the kernels cannot run on a GPU nothing is encoded.
    encodings = {} if encoded.refusal(device) else ENCODINGS
    for name, encoding in encodings.items():
        checks.append((name, _MIXED, functools.partial(_compare_encoded, device, encoding)))
    wrong: list[str] = []
    paths = set()
    for name, dtypes, compare in checks:
        try:
            with _current(device), counting.count_launches() as launched:
                problem = compare()
            paths |= {launch.path for launch in launched}
        except Exception as error:
            problem = one_line(error)
        if problem:
            wrong.append(f"wire {name}, gradients {'/'.join(str(dtype)[6:] for dtype in dtypes)}: {problem}")
    if wrong:
        action = (
            "do not train with this build: install a tested pair of torch and triton "
            f"({_pairs()}); if the error remains, report it with the output of fusedreduce doctor --json"
        )
        return Finding("broken", "kernels", f"{device}: {'; '.join(wrong)}", action)
    if device.type == "cuda" and (why := dispatch.without_kernels(device)):
        reason, _, action = why.partition(". ")
        text = f"{device}: {reason}: torch operators give the right bits, slower, and no wire of 8 or 4 bits"
        return Finding("warning", "kernels", text, action)
    how = {"triton": "compiled", "interpreter": "interpreted", "torch": "torch operators"}
    took = f"{' and '.join(sorted(how[path] for path in paths))}, {time.monotonic() - began:.1f} s"
    return Finding(
        "ok", "kernels", f"{device}: the right bits on wires {', '.join((*PLAIN_WIRES, *encodings))} ({took})"
    )


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Context manager in which kernels are launched on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _compare(device: torch.device, wire_dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> str:
    """The first difference between this device and the reference; "" if there is none."""
    layout = aligned_layout(_NUMELS, wire_itemsize_bytes=wire_dtype.itemsize)
    kinds = [dtypes[slot % len(dtypes)] for slot in range(len(_NUMELS))]
    shapes = [((numel,), (1,)) for numel in _NUMELS]
    compute = torch.float64 if torch.float64 in dtypes else torch.float32

    def chunks() -> ChunkTable:
        return ChunkTable(layout.numels, layout.offsets, kinds, layout.numel, shapes=shapes)

    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu").to(kind)
        for numel, kind in zip(_NUMELS, kinds, strict=True)
    ]
    for place, value in enumerate((float("nan"), float("-inf"), -0.0, 65504.0, 1e-7, 3e38)):
        gradients[1][place] = gradients[3][place] = value
    gradients[3][-1] = 1e-40  # in an fp32 gradient: the interpreter reads so small numbers of bf16 as 0
    scale = torch.tensor([_SCALE], dtype=compute, device="cpu")
    wire, ours = (torch.full((layout.numel,), 7.0, dtype=wire_dtype, device="cpu") for _ in range(2))
    reference.pack(gradients, chunks(), PointerTable(), wire, _DIVISOR)
    ours, there = ours.to(device), [gradient.clone().to(device) for gradient in gradients]
    table, pointers = chunks(), PointerTable()
    dispatch.unchecked(device, (wire_dtype,)).pack(there, table, pointers, ours, _DIVISOR)
    if difference := _difference("packed", [wire], [ours]):
        return difference
    for tensors in (gradients, there):
        for tensor in tensors:
            tensor.fill_(7.0)
    reference.unpack(gradients, chunks(), PointerTable(), wire, scale)
    dispatch.unchecked(device, table.dtype_set).unpack(there, table, pointers, ours, scale.to(device))
    return _difference("unpacked", gradients, there)


def _compare_encoded(device: torch.device, encoding: Encoding) -> str:
    """As `_compare`, of a bucket that is encoded, and decoded twice: two contributions, which are added up."""
    layout = block_layout(_NUMELS, block_numel=encoding.block_numel, shard_align=encoding.shard_align, shards=1)
    kinds = [_MIXED[slot % len(_MIXED)] for slot in range(len(_NUMELS))]
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu").to(kind)
        for numel, kind in zip(_NUMELS, kinds, strict=True)
    ]
    gradients[3][0] = float("nan")
    found: list[list[torch.Tensor]] = []
    for where, does in ((torch.device("cpu"), reference_encoded), (device, encoded)):
        table = EncodedTable(layout.numels, layout.offsets, kinds, layout.numel, encoding, 1)
        there = [gradient.clone().to(where) for gradient in gradients]
        bucket = torch.full((table.layout.nbytes,), 7, dtype=torch.uint8, device=where)
        does.encode(there, table, PointerTable(), bucket, _DIVISOR)
        scale = torch.tensor([_SCALE], dtype=torch.float32, device="cpu").to(where)
        does.decode(there, table, PointerTable(), torch.cat([bucket, bucket]), scale)
        found.append([bucket.view(torch.int16), *there])
    return _difference("encoded and decoded", *found)


def _difference(what: str, expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> str:
    """The first element that differs in any bit; all NaNs count as equal."""
    for number, (right, found) in enumerate(zip(expected, (tensor.cpu() for tensor in got), strict=True)):
        bits = _BITS[right.element_size()]
        wrong = (right.view(bits) != found.view(bits)) & ~(right.isnan() & found.isnan())
        if wrong.any():
            at = int(wrong.nonzero()[0])
            values = f"{found[at].item()!r}, expected {right[at].item()!r}"
            return f"{what} tensor {number}, element {at} is {values} ({int(wrong.sum())} of {len(right)} differ)"
    return ""


def _of_versions(found: dict[str, str | None]) -> list[Finding]:
    shown = ", ".join(f"{name} {version}" for name, version in found.items() if version is not None)
    if found["triton"] is None:
        needed = torch.cuda.is_available()
        action = "pip install triton" if needed else ""
        text = f"{shown}; triton is missing, so torch operators run in place of kernels"
        return [Finding("warning" if needed else "note", "versions", text, action)]
    pair = (str(found["torch"]).partition("+")[0], found["triton"])
    if pair in TESTED:
        return [Finding("ok", "versions", f"{shown}; this torch and triton are a tested pair")]
    return [
        Finding(
            "note",
            "versions",
            f"{shown}; torch {pair[0]} with triton {pair[1]} is not the pair of our tests ({_pairs()})",
        )
    ]


def _of_devices(known: dict[str, Any]) -> list[Finding]:
    found = []
    if known["gpus"]:
        kinds = [f"{gpu['name']} (sm_{gpu['capability']}, {gpu['memory_gib']} GiB)" for gpu in known["gpus"]]
        shown = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        libraries = f"driver {known['driver'] or 'not known'}, NCCL {known['nccl'] or 'missing'}"
        missing = Finding("broken", "device", f"{shown}; {libraries}", "install a torch with NCCL")
        found.append(missing if known["nccl"] is None else Finding("ok", "device", f"{shown}; {libraries}"))
    elif known["driver"] is None:
        text = f"no GPU: torch operators in place of kernels, Gloo in place of NCCL, on {known['processor']}"
        found.append(Finding("note", "device", text))
    else:
        text = f"a driver ({known['driver']}) is loaded, but torch finds no GPU: torch operators and Gloo are used"
        action = (
            "install a CUDA build of torch: this one is for CPU only"
            if torch.version.cuda is None
            else "check CUDA_VISIBLE_DEVICES, whether nvidia-smi works, and whether the driver is new enough for CUDA "
            f"{torch.version.cuda}"
        )
        found.append(Finding("warning", "device", text, action))
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        text = "TRITON_INTERPRET is set: kernels run in Triton's interpreter, which is for tests and very slow"
        found.append(Finding("warning", "kernels", text, "unset TRITON_INTERPRET"))
    return found


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": properties.major * 10 + properties.minor,
        "memory_gib": round(properties.total_memory / 2**30),
    }


def _driver() -> str | None:
    """The NVIDIA driver's version, if one is loaded."""
    try:
        text = DRIVER.read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else text.strip()


def _pairs() -> str:
    return " or ".join(f"torch {torchs} with triton {tritons}" for torchs, tritons in TESTED)
