"""Architectures that the kernels cannot be compiled for, as tried with Triton 3.7 and 3.6.

Everything else compiles, for compute capabilities 6.0 to 12.1 (below 8.0 bf16 is rounded in integer arithmetic: to
nearest even and keeping NaN, like the hardware from there on; the assembler of 3.6 does not know 11.0) and for AMD's
gfx908, gfx90a, gfx942, gfx950 and RDNA.
`dispatch` refuses those listed, `aot` reports them as unsupported.
"""

from __future__ import annotations

_NO_CODE = "Triton generates no code for this architecture (of AMD's data-centre line it knows gfx908 and later)"
# Triton's (backend, architecture).
UNSUPPORTED = frozenset(
    ("hip", name) for name in ("gfx803", "gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c", "gfx940", "gfx941")
)


def unsupported(target: tuple[str, int | str]) -> str | None:
    """Why `target`, Triton's (backend, architecture), cannot run the kernels; None if it can."""
    return _NO_CODE if target in UNSUPPORTED else None
