"""`python -m fusedreduce.cli`, for where the `fusedreduce` script is not on the path."""

import sys

from . import main

sys.exit(main())
