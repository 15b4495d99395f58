"""Saving and loading a session: which of its objects go into a checkpoint, and under which name."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.checkpoint import files, model, retention, sidecar, state, store
from hasten.checkpoint.contents import Contents, concerns
from hasten.checkpoint.remote import RemoteFolder, fetched, folder_of, is_remote, spool
from hasten.collectives.objects import broadcast_object_list, gather_object
from hasten.collectives.together import together
from hasten.settings.values import nearest
from hasten.weights import empty

if TYPE_CHECKING:
    from hasten.checkpoint.background import Saving
    from hasten.session import Session
    from hasten.settings.project import ProjectConfiguration

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

LATEST = "latest"
PREEMPTED = "preempted"  # the folder of checkpoints that a signal asked for, where none are named automatically


def contents_of(session: Session) -> Contents:
    """What of a session a checkpoint holds."""
    scaling = session.scaling
    if scaling is not None:
        scaling.settle()
    return Contents(
        models=[session.engine.unwrap(model) for model in session.models],
        optimizers=session.optimizers,
        schedulers=session.schedulers,
        dataloaders=session.dataloaders,
        custom=session.custom,
        scaler=None if scaling is None else scaling.scaler,
        step=session.gradients.step,
        exchange_orders=[session.engine.exchange_order(model) for model in session.models],
        divided=session.engine.divides_state,
    )


def save_state(
    session: Session, project: ProjectConfiguration, output_dir: PathLike | None, options: dict[str, Any]
) -> Path | str | Saving:
    """Write a checkpoint; see `Accelerator.save_state`.

    Raises:
        OSError, RuntimeError: the save before, in the background, has failed.
        ValueError: no folder is given and checkpoints are not named automatically.
    """
    settle(session)
    if not session.gradients.sync_gradients:
        logger.warning(
            "save_state() in the middle of an accumulation window: the gradients of its micro-batches so far are not part of a "
            "checkpoint, so a resumed run will differ. Save where `accelerator.sync_gradients` is true."
        )
    _check_options(options, "save_state", ("safe_serialization", "blocking", "use_dcp"))
    _check_place(session, output_dir, project)
    for item in session.models:
        empty.check_values(session.engine.unwrap(item))
    more = {
        **_form(session, options),
        "hooks": list(session.save_hooks.values()),
        "save_on_each_node": project.save_on_each_node,
        **options,
    }
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError(
                "save_state() needs a folder: pass `output_dir`, or let checkpoints be named automatically with "
                "`ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)`."
            )
        saved = state.save(output_dir, contents_of(session), session.world, **more)
        project.iteration += 1
        return _noted(session, saved)
    if output_dir is not None:
        logger.warning(
            "save_state(%r): under automatic checkpoint naming the folder is not used; this one is numbered in %s.",
            str(output_dir),
            retention.folder_of_all(_project_dir(project)),
        )
    try:
        saved = retention.save_numbered(
            _project_dir(project), project.iteration, project.total_limit, contents_of(session), session.world, **more
        )
    except OSError:
        if getattr(more.get("form"), "is_silent", False):
            project.iteration += 1  # the others have not heard of it, and go on to the next number
        raise
    project.iteration = retention.number_of(saved.path if hasattr(saved, "path") else saved) + 1
    return _noted(session, saved)


def _check_options(options: dict[str, Any], call: str, known: tuple[str, ...]) -> None:
    """Refuse options that nothing would look at.

    Raises:
        TypeError: names the option, and those that there are.
    """
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(
            f"{call}() has no option {unknown[0]!r}{nearest(unknown[0], known)}; it has {', '.join(known)}."
        )


def _check_place(session: Session, folder: PathLike | None, project: ProjectConfiguration) -> None:
    """Refuse places where nobody would look for a checkpoint.

    Raises:
        ValueError: an empty name, a URL of which every process has its own, or one that each machine is to have of its own.
    """
    place = project.project_dir if folder is None or project.automatic_checkpoint_naming else folder
    if folder is not None and not os.fspath(folder):
        raise ValueError(
            "save_state(''): an empty name would be the current folder. Pass a folder, or '.' if you mean that."
        )
    remote = None if place is None else folder_of(place)
    if not isinstance(remote, RemoteFolder):
        return
    if project.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True is for machines with disks of their own; a URL is one place for all of them."
        )
    if session.world.size > 1 and remote.is_of_one_process:
        raise ValueError(
            f"{place}: each of the {session.world.size} processes has a memory of its own. Use a folder or a URL."
        )


def _noted(session: Session, saved: Any) -> Path | str | Saving:
    """What the user gets: a path, a URL, or the save in the background."""
    if isinstance(saved, Path):
        return saved
    if isinstance(saved, RemoteFolder):
        return str(saved)
    if isinstance(saved.path, RemoteFolder):
        saved.path = str(saved.path)
    session.saving = saved
    return saved


def save_preempted(session: Session, project: ProjectConfiguration) -> Path | str | Saving:
    """Write a checkpoint because a signal has come; see `ProjectConfiguration.save_on_signal`."""
    try:
        settle(session)
    except (OSError, RuntimeError) as error:  # there is no time to lose: this save may go well
        logger.warning("The save before this one, in the background, has failed: %s", error)
    folder = None if project.automatic_checkpoint_naming else _project_dir(project) / PREEMPTED
    return save_state(session, project, folder, {"safe_serialization": True})


def settle(session: Session) -> None:
    """Wait for the save in the background, if there is one, and raise what went wrong unless that has been told."""
    saving, session.saving = session.saving, None
    if saving is not None:
        saving.settle()


def _form(session: Session, options: dict[str, Any]) -> dict[str, Any]:
    """How models are written; takes `use_dcp` out of the options.

    Raises:
        ValueError: `use_dcp` is given, but nothing is sharded.
    """
    use_dcp = options.pop("use_dcp", None)
    if session.engine.divides_state:
        from hasten.checkpoint.sharded import Form, form_of

        plugin = session.state.fsdp_plugin
        form = form_of(plugin.state_dict_type, plugin.uses_dcp if use_dcp is None else use_dcp)
        if form is not Form.RANKS and session.engine.before_save is not None:
            session.engine.before_save()
        return {"form": form}
    if use_dcp is not None:
        raise ValueError("`use_dcp` says how sharded models are saved, but these are not sharded: leave it out.")
    return {"model_state": session.engine.model_state_dict}


def load_state(
    session: Session,
    project: ProjectConfiguration,
    input_dir: PathLike | None,
    load_kwargs: dict[str, Any] | None,
    model_kwargs: dict[str, Any],
    checksums: bool = False,
    fallback: bool = False,
) -> None:
    """Restore a checkpoint; see `Accelerator.load_state`.

    Raises:
        RuntimeError: it is damaged.
        ValueError: there is no such checkpoint, or none is named.
    """
    settle(session)
    with _chosen(session, project, input_dir, checksums, fallback) as folder:
        _restore(session, project, folder, load_kwargs, model_kwargs)


def _restore(
    session: Session,
    project: ProjectConfiguration,
    folder: Path,
    load_kwargs: dict[str, Any] | None,
    model_kwargs: dict[str, Any],
) -> None:
    """Restore a checkpoint that is on this machine."""
    if not session.gradients.sync_gradients:  # the window that is left behind must not add to the one that comes
        for optimizer in session.optimizers:
            optimizer.optimizer.zero_grad()
    _repeat_exchange_orders(session, folder)

    def restore() -> None:
        found = state.load(
            folder,
            contents_of(session),
            session.world,
            hooks=list(session.load_hooks.values()),
            load_kwargs=load_kwargs,
            **{"map_location": _default_location(session), **model_kwargs},
        )
        session.gradients.step = found.get("step", session.gradients.step)
        if project.automatic_checkpoint_naming:
            # Whatever checkpoint was loaded, the next one must not run into one that is there.
            project.iteration = retention.next_iteration(retention.folder_of_all(_project_dir(project)))

    if sidecar.is_save(folder) and session.engine.divides_state:
        # Nothing in it waits for others: the error of one is told here, and no one saves before all have seen which number is next.
        together(session.world, f"{folder} was not loaded", restore)
    else:
        restore()


@contextmanager
def _chosen(
    session: Session, project: ProjectConfiguration, input_dir: PathLike | None, checksums: bool, fallback: bool
) -> Iterator[Path]:
    """The checkpoint that is meant; with `checksums` one whose files have theirs, on every rank. From a URL it is fetched."""
    for folder in _offered(session, project, input_dir, fallback):
        with _here(folder, session) as local:
            problem = _damage(session, local, folder) if checksums else None
            if problem is None:
                yield local
                return
        if not fallback:
            raise RuntimeError(problem)
        logger.warning("%s Taking the one before.", problem)
    raise AssertionError("whoever offers says that there are no more")


def _here(folder: Path | RemoteFolder, session: Session) -> AbstractContextManager[Path]:
    if isinstance(folder, Path):
        return nullcontext(folder)
    return fetched(folder, lambda name: concerns(name, session.world.rank), session.world.patience)


def _offered(
    session: Session, project: ProjectConfiguration, input_dir: PathLike | None, fallback: bool
) -> Iterator[Any]:
    """The checkpoint that is named, or the complete ones, the newest first."""
    base: Any
    if input_dir is not None and (os.fspath(input_dir) != LATEST or Path(input_dir).is_dir()):
        folder: Any = folder_of(input_dir)
        if isinstance(folder, Path) and folder.is_file():
            raise ValueError(f"Tried to load {folder}, which is a file: pass the folder of the checkpoint.")
        if isinstance(folder, Path) and not folder.is_dir():
            raise ValueError(f"Tried to find {folder} but folder does not exist")
        if fallback:
            raise ValueError(
                f"load_state({str(folder)!r}, fallback=True): which one is before it? Leave the folder out."
            )
        offered = iter([folder])
        base = folder
    elif project.automatic_checkpoint_naming:
        base = retention.folder_of_all(_project_dir(project))
        offered = retention.complete(base)
    else:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    return _same_on_all(session, offered, base) if session.engine.divides_state else offered


def _same_on_all(session: Session, offered: Iterator[Any], base: Any) -> Iterator[Any]:
    """What the main process is offered, when all are here: before, a checkpoint may wait for files of those that still save.

    Args:
        session: the session.
        offered: the checkpoints, as this process sees them.
        base: a folder that all processes see, which contains them.
    """
    session.world.barrier("load_state")
    while True:
        told: list[Any] = [None]
        if session.world.is_main:
            try:
                folder = next(offered)
                told = [str(folder) if isinstance(base, RemoteFolder) else os.path.relpath(store.resolve(folder), base)]
            except (ValueError, RuntimeError) as error:
                told = [type(error)(str(error))]
        broadcast_object_list(told, world=session.world)
        if isinstance(told[0], Exception):
            raise told[0]
        yield RemoteFolder(told[0]) if isinstance(base, RemoteFolder) else base / told[0]


def _damage(session: Session, folder: Path, named: Any) -> str | None:
    """What is wrong with a checkpoint for some rank, which is then wrong for all; messages call it as the user does."""
    problem = None
    try:
        state.verify(folder, session.world, checksums=True)
    except RuntimeError as error:
        problem = str(error).replace(str(folder), str(named))
    return next((each for each in gather_object([problem], world=session.world) if each), None)


def _repeat_exchange_orders(session: Session, folder: Path) -> None:
    """Begin with the arrangement of gradients that the saved run had; what this leaves in the models is overwritten next."""
    # A sum of two does not depend on it, and shards have none.
    if session.world.size <= 2 or session.engine.divides_state:
        return
    orders: list[Any] = [None]
    if session.world.is_main:
        # Where this cannot be read, neither can the rest; all ranks find that out by themselves.
        with suppress(Exception):
            orders = [state.exchange_orders(folder)]
    # Only the main process's folder counts: where it has no orders, nobody may wait for an exchange.
    broadcast_object_list(orders, world=session.world)
    for item, names in zip(session.models, orders[0] or (), strict=False):
        if names is not None:
            session.engine.repeat_exchange_order(item, names)


def save_model(
    session: Session, item: Any, folder: PathLike, max_shard_size: int | str, safe: bool, each_node: bool
) -> None:
    """Write a model's weights; see `Accelerator.save_model`."""
    if is_remote(folder):
        _send_model(session, item, RemoteFolder(os.fspath(folder)), max_shard_size, safe)
        return
    if session.engine.divides_state:
        from hasten.checkpoint import by_name

        empty.check_values(session.engine.unwrap(item))
        parts = by_name.model_state(session.engine.unwrap(item))
        model.save_divided(parts, folder, max_shard_size, safe, save_on_each_node=each_node, world=session.world)
        return
    whole = session.engine.model_state_dict(item)
    model.save_model(whole, folder, max_shard_size, safe, save_on_each_node=each_node, world=session.world)


def _send_model(session: Session, item: Any, remote: RemoteFolder, max_shard_size: int | str, safe: bool) -> None:
    """Write a model's weights to a URL; what is there is replaced file by file, the index last."""
    local = spool(remote.url)
    if session.world.is_main:
        shutil.rmtree(local, ignore_errors=True)
    save_model(session, item, local, max_shard_size, safe, each_node=False)
    if session.world.is_main:
        names = sorted(os.listdir(local), key=lambda name: name.endswith(".json"))
        try:
            remote.send(local, names)
            family = model.family_of(safe)
            remote.remove([name for name in remote.files() if family.has(name) and name not in names])
        finally:
            shutil.rmtree(local, ignore_errors=True)


def save(session: Session, obj: Any, file: Any, safe: bool, each_node: bool) -> None:
    """Write one object; see `Accelerator.save`."""
    if is_remote(file):
        remote = RemoteFolder(os.fspath(file))
        local = spool(remote.url)
        local.parent.mkdir(parents=True, exist_ok=True)
        files.save(obj, local, safe_serialization=safe, world=session.world)
        if session.world.is_main:
            remote.parent.send(local.parent, [local.name])
            local.unlink()
        return
    files.save(obj, file, save_on_each_node=each_node, safe_serialization=safe, world=session.world)


def _project_dir(project: ProjectConfiguration) -> Any:
    if project.project_dir is None:
        raise ValueError(
            "Automatic checkpoint naming needs the folder of the run: pass `project_dir` to Accelerator or ProjectConfiguration."
        )
    return folder_of(project.project_dir)


def _default_location(session: Session) -> str | None:
    # Several ranks that read through host memory at once hold several copies of the model there.
    return "on_device" if session.world.group is not None and not session.world.row.is_cpu else None
