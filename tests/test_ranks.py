import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

from tests import rank_zygote, ranks
from tests.ranks import RankError, run_ranks


def total(start: int, step: int = 1) -> int:
    tensor = torch.tensor([start + step * dist.get_rank()])
    dist.all_reduce(tensor)
    return int(tensor)


def test_values_in_rank_order_are_returned():
    assert run_ranks(total, 2, 10, step=5) == [25, 25]

if __name__ == "__main__":
    import time
    t=time.perf_counter(); run_ranks(total,2,1); print("cold", time.perf_counter()-t)
    for n in (2,4,1):
        for i in range(6):
            t=time.perf_counter(); run_ranks(total,n,1); print(n, "warm", round(1e3*(time.perf_counter()-t),1))
    for i in range(4):
        t=time.perf_counter(); run_ranks(total,2,1,fresh=True); print("fresh", round(1e3*(time.perf_counter()-t),1))
