"""Python imports this at its start, where `python -m fusedreduce.run` has put this folder first on PYTHONPATH.

Takes the folder off sys.path, has torch's DistributedDataParallel make wrappers of ours once torch defines it, and
gives way to the sitecustomize that would have been imported without it. Neither torch nor fusedreduce is imported here.

Written so that any Python 3 reads it: a script may start tools that have one of their own.
"""

import os
import sys

TYPE_CHECKING = False  # as type checkers read it; every Python that is started would have to import `typing`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_MODULE = "torch.nn.parallel.distributed"


class _Finder:
    """Finds that one module as it would be found without this, and has `_patch` see it once it is executed."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != _MODULE:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: "Any") -> None:
        execute = loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            del loader.exec_module  # the loader's own again
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _patch(module)

        loader.exec_module = exec_module


def _patch(module: "Any") -> None:
    """Has torch's class start fusedreduce when it is first called: torch itself is still being imported here."""
    import atexit
    import functools

    kind = module.DistributedDataParallel
    torch_init = kind.__init__

    @functools.wraps(torch_init)
    def __init__(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        from fusedreduce.run import process

        process.initialise(__init__, torch_init, self, args, kwargs)

    kind.__init__ = __init__
    atexit.register(_warn_if_unused, os.getpid())


def _warn_if_unused(pid: int) -> None:
    """At the end of rank 0, if it has started a process group and no wrapper was ever made."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if pid != os.getpid() or c10d is None or "fusedreduce.run.process" in sys.modules:
        return
    started = c10d.is_initialized() or getattr(c10d, "_default_pg_init_method", None) is not None
    rank = str(c10d.get_rank()) if c10d.is_initialized() else os.environ.get("RANK")
    if started and rank == "0" and sys.stderr is not None:
        sys.stderr.write(
            "fusedreduce: this program made no torch.nn.parallel.DistributedDataParallel, so nothing was changed\n"
        )


sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
if _MODULE in sys.modules:
    _patch(sys.modules[_MODULE])
else:
    sys.meta_path.insert(0, _Finder())
# The one of this environment, which stays in sys.modules. Where there is none this import fails, and so does that of
# this file, which Python passes over as it does without it.
del sys.modules[__name__]
__import__("sitecustomize")
