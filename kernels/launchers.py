"""What launches the Triton kernels, in one place: the functions of the compiled and the interpreted path.

To import it is to import triton, so `dispatch` does so when the first launch needs it.
"""

from . import variants
from .combine import CombineTables, combine, serves
from .combine_encoded import combine_encoded
from .decode import decode
from .encode import encode
from .pack import pack
from .stats import reduce_partials, reduce_source_partials
from .unpack import unpack
from .walk import measure, scale

__all__ = [
    "CombineTables",
    "combine",
    "combine_encoded",
    "decode",
    "encode",
    "measure",
    "pack",
    "reduce_partials",
    "reduce_source_partials",
    "scale",
    "serves",
    "unpack",
    "variants",
]
