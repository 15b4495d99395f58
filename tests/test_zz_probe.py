import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from tests.ranks import run_ranks, RankError
def f(first_sync):
    l=nn.Linear(2,1,bias=False); nn.init.ones_(l.weight)
    m=DDP(l,static_graph=True); out=[]
    r=dist.get_rank()
    try:
        if first_sync:
            m(torch.ones(1,2)*(r+1)).sum().backward(); out.append(l.weight.grad.tolist()); m.zero_grad()
        for i in range(2):
            with m.no_sync():
                m(torch.ones(1,2)*(r+1)).sum().backward()
            m(torch.ones(1,2)*(r+1)).sum().backward(); out.append(l.weight.grad.tolist()); m.zero_grad()
    except Exception as e: out.append(str(e)[:60])
    return out
def test_a():
    for b in (True,False):
        try:
            for r in run_ranks(f,2,b): print(b,r)
        except RankError as e: print(b,str(e)[-600:])
