"""The core where what only POSIX or Linux has is taken away: what macOS and Windows need. See `without_posix/sitecustomize.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = Path(__file__).parent / "without_posix"

LOOP = """
import importlib, os, signal, sys
for module in ("fcntl", "resource"):
    try:
        importlib.import_module(module)
    except ImportError:
        continue
    sys.exit(f"{module} is still there")
assert not any(hasattr(os, name) for name in ("preadv", "posix_fadvise"))
assert not any(hasattr(signal, name) for name in ("SIGUSR1", "SIGHUP"))

import torch
from hasten import Accelerator, set_seed

set_seed(3)
accelerator = Accelerator(cpu=True, mixed_precision=MIXED, gradient_accumulation_steps=2, scheduler_unit="process")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
data = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

def epoch():
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses

first = epoch()
folder = accelerator.save_state("state")
second = epoch()
accelerator.load_state("state")
assert epoch() == second, "resumed differently"
accelerator.save_model(model, "model", max_shard_size="1KB")
accelerator.wait_for_everyone()
assert os.path.exists("model/model.safetensors"), os.listdir("model")
accelerator.end_training()
accelerator.print("trained", accelerator.num_processes, len(first))
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(WITHOUT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_core_trains_saves_and_resumes(tmp_path: Path, precision: str):
    (tmp_path / "script.py").write_text(LOOP.replace("MIXED", repr(precision)))
    done = run(tmp_path, sys.executable, "script.py")
    assert (done.stdout, done.stderr, done.returncode) == ("trained 1 6\n", "", 0)


def test_a_job_of_two_is_launched(tmp_path: Path):
    (tmp_path / "script.py").write_text(LOOP.replace("MIXED", repr("no")))
    done = run(tmp_path, sys.executable, "-m", "hasten", "launch", "--cpu", "--num_processes", "2", "script.py")
    assert (done.stdout, done.stderr, done.returncode) == ("trained 2 3\n", "", 0)


EVERYTHING = """
import importlib, pkgutil, hasten
skipped = {"hasten.__main__", "hasten.shadow.__main__"}
for module in pkgutil.walk_packages(hasten.__path__, "hasten."):
    if module.name not in skipped:
        importlib.import_module(module.name)
for name in hasten.__all__:
    getattr(hasten, name)
print("imported")
"""


def test_every_module_can_be_imported(tmp_path: Path):
    done = run(tmp_path, sys.executable, "-c", EVERYTHING)
    assert (done.stdout, done.stderr) == ("imported\n", "")
