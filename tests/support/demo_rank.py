"""Stands for a rank of the demo, `python -m demo_rank FOLDER`: what it does is in FUSEDREDUCE_STAND_IN; no torch."""

from __future__ import annotations

import os
import signal
import time

if __name__ == "__main__":
    does = os.environ["FUSEDREDUCE_STAND_IN"]
    if os.environ["RANK"] == "1":
        os.kill(*(os.getpid(), signal.SIGKILL) if does == "die" else (os.getppid(), signal.Signals[does]))
    time.sleep(300)
