"""Small objects to save, and what is in them."""

from pathlib import Path
from typing import Any

import torch

from hasten.checkpoint.state import Contents


class Tied(torch.nn.Module):
    """A model with tied weights, a buffer and two types."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)) * self.scale.float())


class Counter:
    """A custom object."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "kinds": {"a", "b"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Loader:
    """A data loader as far as checkpoints care."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": torch.tensor([self.position])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "position" not in state:
            raise ValueError("not a state of this loader")
        assert state["order"].item() == state["position"]
        self.position = state["position"]


def flip(path: Path) -> None:
    """Damage a file by one bit in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make(value: int) -> Contents:
    """Two models, optimizers and schedulers that have made steps, a scaler, a loader and two custom objects, made from `value`."""
    torch.manual_seed(value)
    models = [Tied(), torch.nn.Linear(3, 2)]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), lr=0.1),
        torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
    for step in range(value % 3 + 1):
        loss = models[0](torch.tensor([1, 2, step])).square().mean() + models[1](torch.ones(3)).sum()
        loss.backward()
        for item in (*optimizers, *schedulers):
            item.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (value % 8))
    return Contents(
        models, optimizers, schedulers, [Loader(value)], [Counter(value), Counter(-value)], scaler, step=value
    )


def values(contents: Contents) -> dict[str, Any]:
    """Everything in the objects, in a form that can be compared with `same`."""
    found: dict[str, Any] = {"scale": contents.scaler.get_scale()}
    for kind in ("models", "optimizers", "schedulers", "dataloaders", "custom"):
        for index, item in enumerate(getattr(contents, kind)):
            found[f"{kind}.{index}"] = item.state_dict()
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two nested objects are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
