"""Where saved states are read from: whole files, folders of shards, and files of single processes, each in the same way.

A source has a skeleton, the saved state with tensors on the meta device, and fills tensors that the caller has for it. So
nothing is read that no one wants, and whole states are never in memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from hasten.checkpoint import sidecar
from hasten.checkpoint.dcp import Place, leaves
from hasten.checkpoint.dcp_folder import METADATA, Folder, is_folder
from hasten.checkpoint.own_file import OwnFile
from hasten.collectives.objects import broadcast_object_list
from hasten.collectives.together import from_main, together
from hasten.collectives.wire import wire_of
from hasten.weights.safe_file import SafeFile
from hasten.weights.torch_file import read_torch
from hasten.world.process import World

T = TypeVar("T")


class Source(Protocol):
    """A saved state that is open for reading."""

    path: Path
    skeleton: Any
    # Places of what this process holds as it is, whatever is divided: of an optimizer's whole matrices it may have some only.
    undivided: frozenset[Place]

    def fill(self, targets: Mapping[Place, torch.Tensor]) -> None:
        """Read tensors, by their places in the state, into memory; every process of the world calls it."""
        ...


class FolderSource:
    """A folder of shards: every process reads what it needs.

    Args:
        path: the folder.
        top: the key under which everything is; left out where there is none.
    """

    undivided: frozenset[Place] = frozenset()

    def __init__(self, path: Path, top: str) -> None:
        self.path = path
        self._folder = Folder(path)
        self._keys = self._folder.keys()
        skeleton = self._folder.skeleton()
        self._top: Place = (top,) if list(skeleton) == [top] and isinstance(skeleton[top], dict) else ()
        self.skeleton = skeleton[top] if self._top else _without_prefix(skeleton, top, self._keys)

    def fill(self, targets: Mapping[Place, torch.Tensor]) -> None:
        """Read this process's shards."""
        self._folder.fill({self._keys[self._top + place]: target for place, target in targets.items()})


def _without_prefix(skeleton: dict[str, Any], top: str, keys: dict[Place, str]) -> dict[str, Any]:
    """Names without "model." before each of them, as some writers leave them flat."""
    prefix = f"{top}."
    if not skeleton or not all(isinstance(key, str) and key.startswith(prefix) for key in skeleton):
        return skeleton
    for place, key in list(keys.items()):
        short = (place[0].removeprefix(prefix), *place[1:])
        keys[short] = key
    return {name.removeprefix(prefix): value for name, value in skeleton.items()}


class FileSource:
    """A file of whole tensors. The main process reads it, and sends tensor by tensor what the others have shards of.

    Args:
        path: the file, as the main process sees it.
        world: the processes; None for this one alone.
        options: arguments of `torch.load`.
    """

    undivided: frozenset[Place] = frozenset()

    def __init__(self, path: Path, world: World | None, options: Mapping[str, Any]) -> None:
        self.path = path
        self._world = world if world is not None and world.size > 1 else None
        self._reads = self._world is None or self._world.is_main
        self._held: Any = None
        self._file: SafeFile | None = None
        told: list[Any] = [together(self._world, f"{path} can not be read", lambda: self._open(options))]
        if self._world is not None:
            broadcast_object_list(told, world=self._world)
        self.skeleton = told[0]

    def _open(self, options: Mapping[str, Any]) -> Any:
        if not self._reads:
            return None
        if self.path.suffix == ".safetensors":
            with SafeFile(self.path) as file:
                return {
                    name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
                    for name, entry in file.entries.items()
                }
        with open(self.path, "rb") as file:
            maps = file.read(4) == b"PK\x03\x04" and options.get("weights_only", True)
        self._held = read_torch(self.path, map_location="cpu", **{"mmap": bool(maps), **options})
        return _skeleton(self._held)

    def fill(self, targets: Mapping[Place, torch.Tensor]) -> None:
        """Read on the main process, send, and keep this process's shards."""
        problem: Exception | None = None
        for place, target in targets.items():
            whole: torch.Tensor | None = None
            if self._reads and problem is None:
                try:
                    whole = self._read(place)
                except Exception as error:
                    problem = error  # told to the others at the end: they are waiting for tensors
            _cut_into(target, self._sent(whole, _at(self.skeleton, place)))
        if self._file is not None:
            self._file.__exit__(None, None, None)
            self._file = None
        together(self._world, f"{self.path} can not be read", lambda: _raise(problem))

    def _read(self, place: Place) -> Any:
        if self._held is not None:
            return _at(self._held, place)
        if self._file is None:
            self._file = SafeFile(self.path)
        return self._file.read(place[0])

    def _sent(self, whole: torch.Tensor | None, form: torch.Tensor) -> torch.Tensor:
        if self._world is None:
            return torch.empty_like(form, device="cpu") if whole is None else whole
        wire = wire_of(self._world)
        assert wire is not None
        if whole is None:
            whole = torch.empty_like(form, device=wire.device)
        whole = whole.to(wire.device).contiguous()
        dist.broadcast(whole, group_src=0, group=self._world.group)
        return whole


class RankSource:
    """This process's own file, of what it held itself. No process waits for another.

    Args:
        path: the file.
        options: arguments of `torch.load`.
    """

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path = path
        self._file = OwnFile(path, options)
        self.skeleton = self._file.skeleton()
        self.undivided = frozenset(place for place, _ in leaves(self.skeleton)) - self._file.shards.keys()

    def fill(self, targets: Mapping[Place, torch.Tensor]) -> None:
        """Read what the file holds."""
        self._file.read(targets)


def _skeleton(held: Any) -> Any:
    if isinstance(held, torch.Tensor):
        return torch.empty(held.shape, dtype=held.dtype, device="meta")
    if isinstance(held, Mapping):
        return {key: _skeleton(value) for key, value in held.items()}
    return [_skeleton(value) for value in held] if isinstance(held, list) else held


def _at(state: Any, place: Place) -> Any:
    for key in place:
        state = state[key]
    return state


def _cut_into(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor, or of it what belongs to this process, into memory."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            mesh = target.device_mesh
            part = distribute_tensor(whole.to(mesh.device_type), mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(whole)


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


# -- finding them --------------------------------------------------------------------------------------------------------

MODEL, OPTIMIZER = "model", "optimizer"
_NAMES = {
    MODEL: (
        "model{}.safetensors",
        "pytorch_model{}.bin",
        "pytorch_model_fsdp{}.safetensors",
        "pytorch_model_fsdp{}.bin",
    ),
    OPTIMIZER: ("optimizer{}.bin",),
}
FOLDERS = {MODEL: "pytorch_model_fsdp_{}", OPTIMIZER: "optimizer_{}"}


def folder_name(kind: str, index: int) -> str:
    """Name of the folder of shards of model or optimizer number `index`."""
    return FOLDERS[kind].format(index)


def rank_name(kind: str, index: int, rank: int) -> str:
    """Name of one process's own file."""
    return f"{FOLDERS[kind].format(index)}_rank{rank}.bin"


def find(folder: Path, kind: str, index: int) -> tuple[str, Path] | None:
    """How a checkpoint holds a model or an optimizer, "file", "folder" or "ranks", and where; None if it does not.

    Raises:
        NotImplementedError: it is held as only FSDP version 1 could, by LOCAL_STATE_DICT.
    """
    number = f"_{index}" if index else ""
    for name in _NAMES[kind]:
        if (folder / name.format(number)).is_file():
            return "file", folder / name.format(number)
    for path in (folder / folder_name(kind, index), folder):
        if is_folder(path):
            return "folder", path
    if (folder / rank_name(kind, index, 0)).is_file():
        return "ranks", folder / rank_name(kind, index, 0)
    if (folder / f"pytorch_model_fsdp{number}_rank0.bin").is_file():
        raise NotImplementedError(
            f"{folder} was saved with LOCAL_STATE_DICT of FSDP version 1, as flat pieces of several parameters each, which only "
            "version 1 with the same settings can read. Load it there, and save it with FULL_STATE_DICT or SHARDED_STATE_DICT."
        )
    return None


@dataclass(frozen=True)
class Found:
    """How a checkpoint holds a model or an optimizer.

    Args:
        how: "file" of whole tensors, "folder" of shards, "ranks" for one file of each process, "own" for the same in a save that
            each process has committed by itself.
        path: where it is; for files of single processes that of this one.
        kind: MODEL or OPTIMIZER.
    """

    how: str
    path: Path
    kind: str

    def open(self, world: World | None, options: Mapping[str, Any]) -> Source:
        """Open it; of a file the main process reads, and all processes call this.

        Args:
            world: the processes; None for this one alone.
            options: arguments of `torch.load`.
        """
        if self.how == "file":
            return FileSource(self.path, world, options)
        return FolderSource(self.path, self.kind) if self.how == "folder" else RankSource(self.path, options)


def look(folder: Path, wanted: Sequence[tuple[str, int]], world: World | None) -> list[Found]:
    """Find what a checkpoint holds of models and optimizers; every process of the world calls it. One exchange.

    Nothing is exchanged for a save that each process has committed by itself: the folder's name tells what it is.

    Args:
        folder: the checkpoint.
        wanted: MODEL or OPTIMIZER, and its number.
        world: the processes, of which the main one looks; None for this one alone.

    Raises:
        FileNotFoundError: there is nothing of one of them.
        ValueError: it was saved process by process, by another number of them.
    """
    rank = 0 if world is None else world.rank
    if sidecar.is_save(folder):
        return [Found("own", _own(folder, kind, index, rank), kind) for kind, index in wanted]

    def find_all() -> list[tuple[str, str]]:
        return [_found(folder, kind, index, world) for kind, index in wanted]

    told = from_main(world, f"{folder} can not be read", find_all)
    found = []
    for (kind, index), (how, name) in zip(wanted, told, strict=True):
        path = folder / name
        found.append(Found(how, path.with_name(rank_name(kind, index, rank)) if how == "ranks" else path, kind))
    return found


def _own(folder: Path, kind: str, index: int, rank: int) -> Path:
    path = folder / rank_name(kind, index, rank)
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} holds no {kind} number {index}: there is no {path.name}. Prepare the same objects in the same order as when "
            "the checkpoint was saved."
        )
    return path


def _found(folder: Path, kind: str, index: int, world: World | None) -> tuple[str, str]:
    found = find(folder, kind, index)
    if found is None:
        missing = [name.format(f"_{index}" if index else "") for name in _NAMES[kind]]
        raise FileNotFoundError(
            f"{folder} holds no {kind} number {index}: no {', '.join(missing)} and no folder {folder_name(kind, index)} with its "
            f"{METADATA}. Prepare the same objects in the same order as when the checkpoint was saved."
        )
    how, path = found
    if how == "ranks":
        pattern = re.compile(re.escape(FOLDERS[kind].format(index)) + r"_rank\d+\.bin")
        count = sum(pattern.fullmatch(entry.name) is not None for entry in folder.iterdir())
        size = 1 if world is None else world.size
        if count != size:
            raise ValueError(
                f"{folder} was saved by {count} processes, each its own file (`use_dcp=False`), and can be loaded by as many only; "
                f"these are {size}. `hasten merge-weights {folder} OUTPUT` makes plain weights of it; or load it with {count} "
                "processes and save it again as SHARDED_STATE_DICT: such checkpoints load on any number."
            )
    return how, path.relative_to(folder).as_posix()
