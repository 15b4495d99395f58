"""Folders that are reached through fsspec (`s3://...`, `gs://...`, `memory://...`): what a checkpoint needs of them.

Such places have no rename: a folder is complete when its manifest is there and every file of the manifest has its size. The
manifest is therefore the last file that is sent, and the first that goes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any

from hasten.checkpoint.leftovers import remove_leftovers
from hasten.checkpoint.manifest import MANIFEST, Manifest

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_FOLDED = re.compile(
    r"(s3|s3a|gs|gcs|az|abfss?|adl|(web)?hdfs|hf|memory|file|https?|s?ftp|ssh|smb|dbfs|r2):[/\\](?![/\\])"
)
_AT_ONCE = 4  # files on their way
_FETCHED = ".fetched"
_USER = "user-"
_COMMON = ("s3", "gs", "az", "abfs", "hf", "http", "https", "sftp", "hdfs", "file", "memory")
_SENDING = ".hasten_sending"  # in a folder that is no checkpoint yet; one without it and a manifest is somebody else's


def is_remote(path: Any) -> bool:
    """Whether a path is a URL for fsspec.

    Raises:
        ValueError: it was one, before it became a `pathlib.Path`.
    """
    if isinstance(path, PurePath) and _FOLDED.match(str(path)):
        raise ValueError(
            f"{path} is a URL that has become a pathlib.Path, which makes one slash of two: it would be a folder on this disk. "
            "Pass it as text."
        )
    return isinstance(path, (str, os.PathLike)) and _URL.match(os.fspath(path)) is not None


@dataclass(frozen=True)
class RemoteFolder:
    """A folder behind a URL.

    Args:
        url: of the folder, e.g. "s3://bucket/run/checkpoint_3".

    Raises:
        ImportError: what fsspec needs for this kind of URL is not installed; the message names it.
        ValueError: fsspec knows no such kind of URL.
    """

    url: str
    _fs: Any = field(init=False, repr=False, compare=False)
    _root: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        import fsspec

        try:
            fs, root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise ImportError(f"{self.url} can not be reached: {error}.") from error
        except ValueError as error:
            known = ", ".join(name for name in fsspec.available_protocols() if name in _COMMON)
            raise ValueError(f"{self.url} can not be reached: {error}. fsspec knows {known} and others.") from error
        object.__setattr__(self, "_fs", fs)
        object.__setattr__(self, "_root", root.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    @property
    def is_of_one_process(self) -> bool:
        """Whether every process has such a place for itself."""
        return "memory" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._root.rpartition("/")[2]

    def __fspath__(self) -> str:
        return self.url

    @property
    def parent(self) -> RemoteFolder:
        """The folder around it."""
        return RemoteFolder(self.url.rstrip("/").rpartition("/")[0])

    def __truediv__(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url.rstrip('/')}/{name}")

    def files(self) -> dict[str, int]:
        """The sizes of all files by their names in the folder; empty if there is no such folder."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {path[len(self._root) + 1 :]: entry["size"] for path, entry in found.items() if path != self._root}

    def children(self) -> list[str]:
        """The names of the folders in this folder."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory")

    def manifest(self) -> Manifest | None:
        """What the folder should hold; None if it says nothing, as while it is being sent.

        Raises:
            RuntimeError: the manifest is damaged.
        """
        try:
            text = self._fs.cat_file(f"{self._root}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / MANIFEST).write_bytes(text)
            try:
                return Manifest.read(Path(place))
            except RuntimeError as error:
                raise RuntimeError(str(error).replace(place, self.url)) from error

    def problems(self) -> list[str]:
        """What is missing, or has another size, one line each; a folder without a manifest is not complete."""
        manifest = self.manifest()
        if manifest is None:
            return [f"{MANIFEST} is missing: it is the last file to be sent"]
        sizes = self.files()
        lines = [f"{name} is missing" for name in manifest.files if name not in sizes]
        return lines + [
            f"{name} has {sizes[name]} bytes instead of {file.size}"
            for name, file in manifest.files.items()
            if sizes.get(name, file.size) != file.size
        ]

    def is_complete(self) -> bool:
        """Whether a whole checkpoint is there."""
        try:
            return not self.problems()
        except RuntimeError:
            return False

    def with_name(self, name: str) -> RemoteFolder:
        """The folder of another name beside this one."""
        return RemoteFolder(f"{self.url.rstrip('/').rpartition('/')[0]}/{name}")

    def withdraw(self) -> set[str]:
        """Make what is there no checkpoint any more, before it is replaced; returns the names of its files."""
        try:
            manifest = self.manifest()
        except RuntimeError:
            manifest = None
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{_SENDING}", b"not complete before the manifest is there")
        self.remove([MANIFEST])
        return set() if manifest is None else set(manifest.files)

    def seal(self, local: Path) -> None:
        """Send the manifest: what is there is a checkpoint from then on."""
        self.send(local, [MANIFEST])
        self.remove([_SENDING])

    def send(self, local: Path, names: Iterable[str]) -> None:
        """Send files of a local folder; what is there under these names is replaced.

        Raises:
            OSError: a file could not be sent.
        """
        names = list(names)
        for parent in sorted({f"{self._root}/{name}".rpartition("/")[0] for name in names}):
            self._fs.makedirs(parent, exist_ok=True)
        self._each(names, lambda name: self._fs.put_file(str(local / name), f"{self._root}/{name}"))

    def fetch(self, local: Path, names: Iterable[str]) -> None:
        """Fetch files into a local folder, each whole or not at all."""

        def get(name: str) -> None:
            place, coming = local / name, local / f"{name}.coming"
            place.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(f"{self._root}/{name}", str(coming))
            os.replace(coming, place)

        self._each(list(names), get)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, as far as they are there."""
        for name in names:
            path = f"{self._root}/{name}"
            if self._fs.exists(path):
                self._fs.rm_file(path)
        self._fs.invalidate_cache()

    def remove_all(self) -> None:
        """Remove the folder, the manifest first, so that what a crash leaves is no checkpoint."""
        self.remove([MANIFEST])
        if self._fs.exists(self._root):
            self._fs.rm(self._root, recursive=True)
        self._fs.invalidate_cache()

    def _each(self, names: list[str], action: Callable[[str], object]) -> None:
        if self._fs.async_impl or len(names) < 2:  # those have a loop of their own, and many connections
            for name in names:
                action(name)
            return
        with ThreadPoolExecutor(_AT_ONCE, "hasten-remote") as pool:
            for done in [pool.submit(action, name) for name in names]:
                done.result()


def folder_of(path: str | os.PathLike[str]) -> Path | RemoteFolder:
    """The folder that a path or a URL names."""
    return RemoteFolder(os.fspath(path)) if is_remote(path) else Path(path).expanduser()


def spool(url: str) -> Path:
    """Where a folder behind a URL is on this machine's disk while it is written: the same for all processes of a user."""
    digest = hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
    tidy()
    return _spools() / digest / RemoteFolder(url).name


def tidy() -> None:
    """Remove what processes of this machine have left that were killed while they sent or fetched."""
    import filelock

    for place in _spools().iterdir():
        if not place.name.endswith(_FETCHED):
            remove_leftovers(place / "any")
            continue
        with suppress(filelock.Timeout, OSError), filelock.FileLock(place / "lock", timeout=0):
            if not _users(place):
                for copied in [each for each in place.iterdir() if each.is_dir()]:
                    shutil.rmtree(copied, ignore_errors=True)


@contextmanager
def fetched(folder: RemoteFolder, concerns: Callable[[str], bool], patience: timedelta) -> Iterator[Path]:
    """A local copy of a complete remote folder, which the processes of a machine share; nobody waits for other machines.

    Args:
        folder: the remote folder.
        concerns: which of its files are wanted, by name.
        patience: how long to wait for another process that fetches the same.

    Raises:
        ValueError: there is no such folder.
        RuntimeError: it is not complete, or another process holds the copy for too long.
    """
    import filelock

    manifest = folder.manifest()
    sizes = folder.files()
    if not sizes:
        raise ValueError(f"Tried to find {folder} but folder does not exist")
    if (manifest is not None or _SENDING in sizes) and (problems := folder.problems()):
        raise RuntimeError(f"The checkpoint {folder} is damaged: {'; '.join(problems)}. Load another one.")
    identity = "plain" if manifest is None else manifest.identity
    digest = hashlib.blake2b(f"{folder.url} {identity}".encode(), digest_size=8).hexdigest()
    local = _spools() / f"{digest}{_FETCHED}" / folder.name
    local.parent.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in sizes if concerns(name)]
    lock = filelock.FileLock(local.parent / "lock", timeout=patience.total_seconds())
    try:
        with lock:
            # Whoever made this copy may have been killed, and the URL may hold something else now.
            if not _users(local.parent):
                shutil.rmtree(local, ignore_errors=True)
            local.mkdir(exist_ok=True)
            folder.fetch(local, [name for name in wanted if not (local / name).exists()])
            (local.parent / f"{_USER}{os.getpid()}").touch()
    except filelock.Timeout as error:
        raise RuntimeError(
            f"Another process of this machine has been fetching {folder} for {patience.total_seconds():g} s. If it is stuck, "
            "end it."
        ) from error
    try:
        yield local
    except (ValueError, RuntimeError, OSError) as error:  # the copy is gone when somebody reads this
        if error.args and isinstance(error.args[0], str):
            error.args = (error.args[0].replace(str(local), folder.url), *error.args[1:])
        raise
    finally:
        with lock:
            (local.parent / f"{_USER}{os.getpid()}").unlink(missing_ok=True)
            if not _users(local.parent):
                shutil.rmtree(local, ignore_errors=True)


def _users(place: Path) -> list[Path]:
    """The marks of the processes that use a copy; those of processes that have died are removed."""
    import psutil

    marks = list(place.glob(f"{_USER}*"))
    for mark in marks:
        if not psutil.pid_exists(int(mark.name.removeprefix(_USER))):
            mark.unlink(missing_ok=True)
    return [mark for mark in marks if mark.exists()]


def _spools() -> Path:
    import getpass

    place = Path(tempfile.gettempdir()) / f"hasten-remote-{getpass.getuser()}"
    place.mkdir(mode=0o700, exist_ok=True)
    return place
