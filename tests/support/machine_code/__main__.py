"""`python -m support.machine_code`."""

import sys

from .check import main

sys.exit(main())
