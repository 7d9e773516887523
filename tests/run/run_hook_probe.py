"""How torch's module of DistributedDataParallel was imported, as one line of JSON."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import tempfile

NAME = "torch.nn.parallel.distributed"
found = importlib.util.find_spec(NAME)  # imports torch.nn.parallel, and with it the module
from torch.nn.parallel import distributed as module  # noqa: E402

spec = module.__spec__
assert found is not None and spec is not None
ddp = module.DistributedDataParallel
seen = {
    "spec": [spec.name, spec.origin, spec.cached, spec.has_location, found is spec],
    "loader": [type(spec.loader).__name__, sorted(vars(spec.loader)), module.__loader__ is spec.loader],
    "file": module.__file__,
    "vars": sorted(vars(ddp)),
    "signature": str(inspect.signature(ddp)),
    "init": [ddp.__init__.__qualname__, ddp.__init__.__module__, ddp.__init__.__doc__],
    "meta_path": [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
    "ours": sorted(name for name in sys.modules if name.startswith("fusedreduce") and "editable" not in name),
    "reloaded": importlib.util.find_spec(NAME) is spec,
}
print(json.dumps(seen))
# A process group, but no wrapper.
from torch import distributed as dist  # noqa: E402
from torch.testing._internal.distributed import fake_pg  # noqa: E402, F401

with tempfile.NamedTemporaryFile() as store:
    dist.init_process_group("fake", init_method=f"file://{store.name}", rank=int(sys.argv[1]), world_size=2)
if len(sys.argv) > 2:
    dist.destroy_process_group()
