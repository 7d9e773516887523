"""`python -m fusedreduce.kernels.aot`."""

import sys

from .compile import main

sys.exit(main())
