"""Saving and loading a sharded model, or its optimizer, by itself: the functions that training programs call one by one.

They write into a folder file by file, without a transaction: what a crash leaves has no metadata, and does not load. All
processes call them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hasten.checkpoint import by_name, commit, sharded, sidecar, sources
from hasten.checkpoint.dcp_folder import METADATA
from hasten.checkpoint.own_file import topology_of
from hasten.checkpoint.sharded import Form, form_of
from hasten.checkpoint.sources import MODEL, OPTIMIZER
from hasten.collectives.together import together
from hasten.weights.write import FolderWriter
from hasten.world import process
from hasten.world.process import World


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a model's weights: `pytorch_model_fsdp_0/` for SHARDED_STATE_DICT, `pytorch_model_fsdp.bin` for FULL_STATE_DICT.

    Args:
        fsdp_plugin: its `state_dict_type` and `sharded_save` count.
        accelerator: its processes take part.
        model: the prepared model.
        output_dir: the folder; it is made.
        model_index: the number in the names.
        adapter_only: write the parameters that are trained, and nothing else.
        use_dcp: False writes shards as one file of each process, without any exchange between them; those load on the same
            number of processes only.
    """
    form, world, own = _form(fsdp_plugin, use_dcp), _world_of(accelerator), _own(model)
    weights = by_name.model_state(own)
    if adapter_only:
        weights = {name: weights[name] for name in _trained(own)}
    with _writing(Path(output_dir), form, MODEL, model_index, world) as writer:
        buffers = frozenset(by_name.buffers(own))
        sharded.write_model(writer, model_index, weights, form, safe=False, world=world, buffers=buffers)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: torch.nn.Module,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read a model's weights, in whatever form the folder holds them; it may also be the folder of shards itself.

    Args:
        fsdp_plugin, use_dcp: the form is found out.
        accelerator: its processes take part.
        model: the prepared model.
        input_dir: the folder.
        model_index: the number in the names.
        adapter_only: names that are missing are returned and not an error.

    Returns:
        The missing and the unexpected names, as `Module.load_state_dict` returns them.

    Raises:
        FileNotFoundError: the folder holds no such weights.
        RuntimeError: they do not fit; the message names what.
    """
    world = _joint(model, accelerator)
    folder = _place(Path(input_dir), model, world)
    return sharded.read_model(folder, model_index, _own(model), world, strict=not adapter_only)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    output_dir: Any,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write an optimizer's state by the names of the model's parameters: `optimizer_0/`, or `optimizer.bin` for FULL_STATE_DICT.

    Arguments as in `save_fsdp_model`.
    """
    form, world = _form(fsdp_plugin, use_dcp), _world_of(accelerator)
    with _writing(Path(output_dir), form, OPTIMIZER, optimizer_index, world) as writer:
        what = f"{writer.folder} was not written"
        state = sharded.optimizer_state(optimizer, [_own(model)], form, world, what)
        sharded.write_optimizer(writer, optimizer_index, state, form, world)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: torch.nn.Module,
    input_dir: Any,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read an optimizer's state and groups. Arguments as in `load_fsdp_model`; `adapter_only` changes nothing, since an optimizer
    holds what is trained anyway."""
    world = _joint(model, accelerator)
    folder = _place(Path(input_dir), model, world)
    sharded.read_optimizer(folder, optimizer_index, optimizer, [_own(model)], world)


def _writing(folder: Path, form: Form, kind: str, index: int, world: World | None) -> FolderWriter:
    """A writer into a folder; old metadata goes first, so that it never speaks of new shards."""
    is_main = world is None or world.is_main
    metadata = folder / sources.folder_name(kind, index) / METADATA

    def begin() -> None:
        commit.make_folder(folder)
        if is_main and form is Form.FOLDERS:
            metadata.unlink(missing_ok=True)

    if form is Form.RANKS:
        begin()
    else:
        together(world, f"{folder} can not be written", begin)
    return FolderWriter(folder)


def _form(fsdp_plugin: Any, use_dcp: bool) -> Form:
    return form_of(fsdp_plugin.state_dict_type, use_dcp and getattr(fsdp_plugin, "uses_dcp", True))


def _place(folder: Path, model: torch.nn.Module, world: World | None) -> Path:
    """Where the files are: where each process has committed its own, in a folder inside the checkpoint's."""
    save = sidecar.current(folder) if folder.is_dir() else None
    if save is None:
        return folder
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    sidecar.check_fits(save, rank, size, topology_of([_own(model)]))
    return save


def _world_of(accelerator: Any) -> World | None:
    world = getattr(getattr(accelerator, "state", None), "world", None)
    world = world if isinstance(world, World) else process.current()
    return world if world.group is not None and world.size > 1 else None


def _joint(model: torch.nn.Module, accelerator: Any) -> World | None:
    """The processes that must read together; a model that is whole on each needs no other."""
    return _world_of(accelerator) if any(isinstance(each, DTensor) for each in model.parameters()) else None


def _own(model: torch.nn.Module) -> torch.nn.Module:
    own: Any = model
    return own.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else own


def _trained(model: torch.nn.Module) -> list[str]:
    trained = {name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    return [by_name.canonical(name) for name in trained]
