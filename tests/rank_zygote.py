"""What a zygote holds before it forks ranks: everything that is slow to import, and no thread.

`ranks.py` gives this module to the fork server as its preload. Torch is imported but not used: a process that has started threads
(OpenMP, autograd, OpenBLAS) can not be forked safely. `torch._dynamo` is here because the first optimizer imports it (1 s).
"""

import gc
from importlib import import_module
from importlib.util import find_spec

MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "hypothesis",
    "psutil",
    "pytest",
    "safetensors",
    "yaml",
    "tests.rank_worker",
)

for _name in MODULES:
    if find_spec(_name.partition(".")[0]):
        import_module(_name)

gc.collect()
gc.freeze()  # the collector of a rank then leaves these pages alone, and they stay shared
