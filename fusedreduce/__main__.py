"""`python -m fusedreduce`, for where the `fusedreduce` script is not on the path."""

import sys

from .cli import main

sys.exit(main())
