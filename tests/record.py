"""Writes tests/reducer/recorded.txt: what every cell of the record does now.

    python tests/record.py

Look at what has changed (`git diff`) before it is committed: each line was a promise. It takes a minute.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]


def main() -> None:
    """Runs all cells."""
    import torch
    from support import recorded, recorded_cases

    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    recorded.RECORD.write_text(
        recorded.text({str(cell): recorded_cases.lines(cell) for cell in recorded_cases.cells()})
    )


if __name__ == "__main__":
    main()
