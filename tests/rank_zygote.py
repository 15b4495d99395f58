"""What a zygote holds before it forks ranks: everything that is slow to import, and no thread.

`ranks.py` gives this module to the fork server as its preload. Torch is imported but not used: a process that has started threads
(OpenMP, autograd, OpenBLAS) can not be forked safely. `torch._dynamo` is here because every optimizer imports it (1 s).
"""

import gc
import os
from importlib.util import find_spec

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel
import torch.utils.data

for _name in ("pytest", "hypothesis", "psutil", "yaml", "safetensors"):
    if find_spec(_name):
        __import__(_name)

import tests.rank_worker  # noqa: F401

PID = os.getpid()

gc.collect()
gc.freeze()  # what is shared stays shared: the collector of a rank does not touch (and so copy) these pages
