"""What a program can see of how it was started, as one line of JSON on stdout: run plainly, and by fusedreduce.run."""

from __future__ import annotations

import atexit
import importlib.util
import json
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
import types

OURS = ("FUSEDREDUCE_", "PYTHONPATH")


class Pickled:
    """Of this file's module, whatever it is called."""


def of_child() -> tuple[str, list[str], bool]:
    """What a spawned process sees."""
    return sys.modules["__mp_main__"].__name__, list(sys.path), "sitecustomize" in sys.modules


def raised() -> str:
    try:
        raise ValueError("raised by the script")
    except ValueError:
        return traceback.format_exc()


def main() -> None:
    me = sys.modules["__main__"]
    spec = me.__spec__
    seen = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "flags": repr(sys.flags),
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "spec": None if spec is None else (spec.name, spec.origin, type(spec.loader).__name__),
        "package": me.__package__,
        "main is this": vars(me) is globals(),
        "main": sorted(vars(me)),
        "stays": isinstance(me, types.ModuleType),
        "cwd": os.getcwd(),
        "environment": {name: text for name, text in os.environ.items() if not name.startswith(OURS)},
        "threads": [one.name for one in threading.enumerate()],
        "pickled": pickle.loads(pickle.dumps(Pickled())).__class__ is Pickled,
        "pickle": repr(pickle.dumps(Pickled())),
        "traceback": raised(),
        "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
        "ours": sorted(name for name in sys.modules if name.startswith("fusedreduce")),
        "ours imported": sorted(name for name in ("torch", "argparse", "typing") if name in sys.modules),
        "relative": os.path.exists(os.path.basename(__file__)),
        "unbuffered": sys.stdout.line_buffering,
        "finder": getattr(importlib.util.find_spec("json"), "origin", None),
    }
    if "--child" in sys.argv:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seen["child"] = pool.apply(of_child)
    print(json.dumps(seen))
    sys.stdout.flush()


if __name__ == "__main__":
    atexit.register(lambda: os.write(1, b"at exit\n"))
    main()
    sys.exit(7)
