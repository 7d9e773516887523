"""Imported by Python at its start, since `python -m fusedreduce.run` has put this folder first on PYTHONPATH.

Removes the folder from sys.path, arranges that torch's DistributedDataParallel has fusedreduce reduce as soon as
torch defines it, and imports the sitecustomize that this file hides. Neither torch nor fusedreduce is imported here.

The syntax is that of any Python 3: a script may start tools that have an interpreter of their own.
"""

import os
import sys

TYPE_CHECKING = False  # type checkers know the name; importing `typing` would slow every Python start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_MODULE = "torch.nn.parallel.distributed"


class _Finder:
    """Finds _MODULE as other finders would, and calls `_patch` with it once it has been executed."""

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
            del loader.exec_module  # restores the class's own
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _patch(module)

        loader.exec_module = exec_module


def _patch(module: "Any") -> None:
    """Replaces what makes objects of torch's class by what imports fusedreduce: torch is still being imported."""
    import atexit

    kind = module.DistributedDataParallel
    for name in ("__init__", "__setstate__"):
        setattr(kind, name, _first(name, getattr(kind, name)))
    atexit.register(_warn_if_unused, os.getpid())


def _first(name: str, torchs: "Any") -> "Any":
    import functools

    @functools.wraps(torchs)
    def call(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        from fusedreduce.run import process

        process.method_for(name, torchs)(self, *args, **kwargs)

    return call


def _warn_if_unused(pid: int) -> None:
    """Warns at exit of rank 0 if it has initialised a process group, but no wrapper was ever made."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if pid != os.getpid() or c10d is None or "fusedreduce.run.process" in sys.modules:
        return
    started = c10d.is_initialized() or getattr(c10d, "_default_pg_init_method", None) is not None
    rank = str(c10d.get_rank()) if c10d.is_initialized() else os.environ.get("RANK")
    if not started or rank != "0" or sys.stderr is None:
        return
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    is_sharded = bool(getattr(fsdp, "cls_to_fsdp_cls", None))  # else it was only imported
    if is_sharded and "fusedreduce._public" not in sys.modules:
        sys.stderr.write(
            "fusedreduce: this program shards its model by fully_shard, which this command does not reach, so "
            "fusedreduce did nothing. With replicas on several nodes (HSDP), write behind fully_shard:\n"
            '    import fusedreduce; fusedreduce.set_fsdp_comms(model, all_reduce="bf16")\n'
            'and with one GPU on each of several nodes reduce_scatter="bf16" instead\n'
        )
    elif not is_sharded:
        sys.stderr.write(
            "fusedreduce: this program made no torch.nn.parallel.DistributedDataParallel, so fusedreduce did nothing\n"
        )


sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
if _MODULE in sys.modules:
    _patch(sys.modules[_MODULE])
else:
    sys.meta_path.insert(0, _Finder())
# The environment's own sitecustomize, which stays in sys.modules. If there is none, this import fails, and with it that
# of this file; Python ignores that, as it does without this file.
del sys.modules[__name__]
__import__("sitecustomize")
