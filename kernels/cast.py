"""CastWire: a wire of 16-bit elements, and how gradients are rounded to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line looks wires up before anything imports torch
    import torch

_DTYPES = ("bfloat16", "float16")
# Bits of fp32 by what they are. The first NaN is one that the top 16 bits alone are not.
_PROBES = {"nan": (0x7F800001, -1), "inf": (0x7F800000,), "-inf": (-0x800000,), "zero": (0, -0x80000000)}


@dataclass(frozen=True)
class CastWire:
    """Gradients travel as elements of a 16-bit dtype, which an all-reduce adds up in that dtype.

    Args:
        dtype: of the wire, torch.bfloat16 or torch.float16, or torch's name of it.
        rounding: from fp32 of any shape and device to values of the wire's dtype, in it or still in fp32; it must keep
            NaN, infinities and zeros. None: to nearest, ties to even. (Of an fp64 gradient it gets the value that is
            rounded to odd in fp32, of which every further rounding is that of the fp64 value.)
        kernel: the same as a `@triton.jit` function of one block of fp32, so that a GPU packs in one launch. None: it
            packs by torch operators where there is a `rounding`.

    Raises:
        ValueError: another dtype, a kernel without a rounding, or a rounding that loses NaN, infinity or zero.
    """

    dtype: torch.dtype | str
    rounding: Callable[[torch.Tensor], torch.Tensor] | None = None
    kernel: Any = None

    def __post_init__(self) -> None:
        if self.dtype_name not in _DTYPES:
            raise ValueError(f"a CastWire's dtype must be torch.bfloat16 or torch.float16, got {self.dtype!r}")
        if self.rounding is not None:
            _check(self.rounding, self.torch_dtype)
        elif self.kernel is not None:
            raise ValueError("a CastWire with a kernel needs the same rounding in torch, for CPU: give rounding= too")

    @property
    def dtype_name(self) -> str:
        """torch's name of the dtype, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype


def _check(rounding: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    """Raises ValueError if a rounding does not keep what every wire keeps."""
    import torch

    for what, bits in _PROBES.items():
        values = torch.tensor(bits, dtype=torch.int32, device="cpu").view(torch.float32)
        rounded = rounding(values.clone())
        if not isinstance(rounded, torch.Tensor) or rounded.shape != values.shape:
            raise ValueError(
                f"rounding must return a tensor of the shape {tuple(values.shape)} that it got: {rounded!r}"
            )
        kept = rounded.to(dtype).float()
        if not bool(torch.where(values.isnan(), kept.isnan(), kept == values).all()):
            raise ValueError(
                f"rounding made {kept.tolist()} of {what}, which a wire must keep, or a fault would pass silently: "
                "return torch.where(values.isfinite() & (values != 0), rounded, values)"
            )
