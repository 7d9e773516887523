"""How far means of gradients are off by wire and number of ranks, by the kernels in the order that ranks call them.

    python perf/bench_errors.py                       # a minute; a JSON in perf/results
    python perf/bench_errors.py --rehearse --out out/errors    # few values of 16 ranks

Errors are relative, of all elements in the L2 norm, against a mean in fp64:

    bf16, ring            16-bit elements added in 16 bits rank by rank, as Gloo's and NCCL's rings add; simulated
    bf16, fp32 sums       accumulation="fp32": contributions are rounded once, their sum once more
    int8, int4            encoded once; from three ranks on the sum of a shard once more
    fp8 e4m3, fp8 e5m2    no wire of ours: as int8, in as many bytes, with elements in floating point
    ..., nodes of 8       contributions are added up in fp32 within a node, and the nodes' sums encoded in this way

Of 131,072 normal values per rank; of Laplace's; of values of one sign; of gradients that the demo's network has after a
few steps, another batch for each rank. The same numbers come out everywhere, but for the network's.

Demanded of any number of ranks: 16 bits added up in fp32 0.25 %, int8 1.0 % (Laplace: 1.5 %), int4 15.5 % (20 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import records
import report_tables
import torch
from records import demand
from report_wires import NODES, RING, SUMS

from fusedreduce.cli import digits
from fusedreduce.kernels import dispatch, encoded
from fusedreduce.kernels.encoded_table import EncodedTable
from fusedreduce.kernels.encodings import ENCODINGS, INT8, Encoding
from fusedreduce.kernels.parts import Part
from fusedreduce.kernels.table import PointerTable
from fusedreduce.planning.layout import block_layout

Tensors = list[torch.Tensor]
RANKS = tuple(2**power for power in range(1, 11))
MOST_FLAT, NODE = 64, 8
NUMEL = 131_072  # a shard of 128 nodes is a multiple of 1,024 elements
MODEL_STEPS, MODEL_RANKS = 50, 64
FP8: Mapping[str, torch.dtype] = {"fp8 e4m3": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2}
GAUSSIAN, LAPLACE, ONE_SIGN = "Gaussian", "Laplace", "one sign"
LIMITS: Mapping[str, Mapping[str, float]] = {
    GAUSSIAN: {SUMS: 0.0025, "int8": 0.010, "int4": 0.155},
    LAPLACE: {SUMS: 0.0025, "int8": 0.015, "int4": 0.20},
    ONE_SIGN: {SUMS: 0.0025},
}


def rounded(tensors: Sequence[torch.Tensor]) -> Tensors:
    """To bf16."""
    return [one.bfloat16() for one in tensors]


def accumulated(contributions: Sequence[Tensors]) -> Tensors:
    """The sum in fp32 of contributions that are rounded to bf16, rounded to bf16."""
    sums = []
    for rows in zip(*map(rounded, contributions), strict=True):
        output = torch.empty_like(rows[0])
        in_order = tuple((0, source) for source in range(1, len(rows)))
        dispatch.combine(list(rows), [output], (Part(0, output.numel(), in_order, 0),))
        sums.append(output)
    return sums


def exchanged(contributions: Sequence[Tensors], encoding: Encoding) -> Tensors:
    """The sum of contributions that travel encoded: two are decoded together, of more each rank combines a shard."""
    ranks, numels = len(contributions), [one.numel() for one in contributions[0]]
    shards = ranks if ranks > 2 else 1
    layout = block_layout(numels, block_numel=encoding.block_numel, shard_align=encoding.shard_align, shards=shards)
    table = EncodedTable(numels, layout.offsets, [torch.float32] * len(numels), layout.numel, encoding, shards)
    sent = torch.empty(ranks, table.layout.nbytes, dtype=torch.uint8, device="cpu")
    for mine, into in zip(contributions, sent, strict=True):
        encoded.encode(mine, table, PointerTable(), into, 1.0)
    if shards > 1:
        received = sent.view(ranks, shards, -1)
        sent = torch.empty(shards, table.layout.shard_bytes, dtype=torch.uint8, device="cpu")
        for owner, into in enumerate(sent):
            encoded.combine_encoded(received[:, owner].contiguous().view(-1), table, into)
    results = [torch.empty_like(one) for one in contributions[0]]
    encoded.decode(results, table, PointerTable(), sent.view(-1), torch.ones(1, device="cpu"))
    return results


def in_fp8(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Tensors:
    """What comes back of blocks of fp8, whose scale makes a block's largest value the largest of fp8."""
    found = []
    for one in tensors:
        blocks = torch.nn.functional.pad(one, (0, -one.numel() % INT8.block_numel)).view(-1, INT8.block_numel)
        scale = (blocks.abs().amax(1, keepdim=True) / torch.finfo(dtype).max).clamp_min(torch.finfo().tiny)
        found.append((blocks / scale).to(dtype).float().mul_(scale).view(-1)[: one.numel()])
    return found


def exchanged_in_fp8(contributions: Sequence[Tensors], dtype: torch.dtype) -> Tensors:
    """The sum in fp32 of contributions in fp8, and from three on of that once more, as of those that are encoded."""
    sums = in_fp8(contributions[0], dtype)
    for one in contributions[1:]:
        torch._foreach_add_(sums, in_fp8(one, dtype))
    return sums if len(contributions) <= 2 else in_fp8(sums, dtype)


def relative_error(sums: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Of all elements, in the L2 norm."""
    off = sum(float((one.double() - other).square().sum()) for one, other in zip(sums, exact, strict=True))
    return math.sqrt(off / sum(float(one.square().sum()) for one in exact))


@dataclass
class Sums:
    """Sums over the ranks that have been added so far; a mean's error is that of the sum, at powers of two."""

    exact: Tensors = field(default_factory=list)
    ring: Tensors = field(default_factory=list)
    flat: list[Tensors] = field(default_factory=list)
    nodes: list[Tensors] = field(default_factory=list)
    ranks: int = 0

    def add(self, gradients: Tensors) -> None:
        """The next rank's."""
        on_wire = rounded(gradients)
        if not self.ranks:
            self.exact = [torch.zeros_like(one, dtype=torch.float64) for one in gradients]
            self.ring = [torch.zeros_like(one) for one in on_wire]
        torch._foreach_add_(self.exact, [one.double() for one in gradients])
        torch._foreach_add_(self.ring, on_wire)
        if self.ranks < MOST_FLAT:
            self.flat.append(gradients)
        if self.ranks % NODE == 0:
            self.nodes.append([one.clone() for one in gradients])
        else:
            torch._foreach_add_(self.nodes[-1], gradients)
        self.ranks += 1

    def errors(self) -> dict[str, float]:
        """By way to add up, of those that this many ranks have."""
        found = {RING: self.ring}
        if self.ranks <= MOST_FLAT:
            # Two ranks' 16-bit elements are all-reduced, which rounds as often.
            found[SUMS] = accumulated(self.flat) if self.ranks > 2 else self.ring
            found |= {name: exchanged(self.flat, encoding) for name, encoding in ENCODINGS.items()}
            found |= {name: exchanged_in_fp8(self.flat, dtype) for name, dtype in FP8.items()}
        if self.ranks > NODE:
            found |= {name + NODES: exchanged(self.nodes, encoding) for name, encoding in ENCODINGS.items()}
        return {name: relative_error(sums, self.exact) for name, sums in found.items()}


def drawn(kind: str, numel: int) -> Iterator[Tensors]:
    """A rank's values, one rank after the other."""
    generator = torch.Generator().manual_seed(0)
    while True:
        values = torch.randn(numel, generator=generator)
        if kind == ONE_SIGN:
            values = values.abs()
        if kind == LAPLACE:  # a normal value times the root of an exponential one
            values *= torch.empty(numel).exponential_(generator=generator).mul_(2.0).sqrt_()
        yield [values]


def recorded() -> Iterator[Tensors]:
    """What `int4` would encode of the demo's network after MODEL_STEPS steps, another batch for each rank."""
    images, model = digits.load()[0], digits.build_model(0)
    optimizer, schedule = digits.build_optimizer(model, 10 * MODEL_STEPS)

    def backward(step: int) -> None:
        batch = images.select(digits.batch_rows(step, len(images), 0, 1, 0))
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.images), batch.labels).backward()

    for step in range(MODEL_STEPS):
        backward(step)
        optimizer.step()
        schedule.step()
    for rank in range(MODEL_RANKS):
        backward(MODEL_STEPS + rank)
        yield [one.grad.flatten() for one in model.parameters() if one.ndim > 1 and one.grad is not None]


def sources(*, few: bool) -> dict[str, tuple[Iterator[Tensors], int]]:
    """What is added up, by name, and over how many ranks at most."""
    numel, most = (8192, 2 * NODE) if few else (NUMEL, max(RANKS))
    found = {kind: (drawn(kind, numel), most) for kind in (GAUSSIAN, LAPLACE, ONE_SIGN)}
    return {**found, "gradients of digits": (recorded(), min(most, MODEL_RANKS))}


def measure(case: str, values: Iterator[Tensors], most: int) -> dict[str, Any]:
    """A row: errors by way to add up and number of ranks, None where there is none."""
    sums, found = Sums(), {}
    while sums.ranks < most:
        sums.add(next(values))
        if sums.ranks in RANKS:
            found[sums.ranks] = sums.errors()
    names = dict.fromkeys(name for of in found.values() for name in of)
    variants = {name: {f"error_{ranks}": found.get(ranks, {}).get(name) for ranks in RANKS} for name in names}
    return {"part": "errors", "case": case, "variants": variants}


def demands(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each way the largest error at any number of ranks."""
    made = []
    for row in rows:
        for wire, most in LIMITS.get(row["case"], {}).items():
            for name in (wire, wire + NODES):
                errors = [one for one in row["variants"].get(name, {}).values() if one is not None]
                if errors:
                    made.append(demand(f"{row['case']}: {name}", max(errors), "<=", most, unit="%"))
    return made


def main() -> int:
    """Measures, prints the tables, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_record()
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(case, values, most) for case, (values, most) in sources(few=asked.rehearse).items()]
    return report_tables.publish(asked, "errors", "cpu", rows=rows, demands=demands(rows), numel=NUMEL)


if __name__ == "__main__":
    records.entry(main)
