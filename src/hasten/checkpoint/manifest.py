"""The manifest of a checkpoint: which files belong to it, and how to tell that they are whole."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hasten.weights.stream import BLOCK, Workers, Written, checksum_file

MANIFEST = "hasten_manifest.json"
_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What was saved, and by whom. The manifest is the last file of a checkpoint: where it is, the checkpoint is complete.

    Args:
        files: size and checksums by name; the names are relative, with forward slashes.
        world_size: number of processes of the run.
        ranks: those that took part in the save.
        identity: differs between any two saves.
    """

    files: dict[str, Written]
    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)

    def text(self) -> str:
        """The content of the manifest's file."""
        import torch

        from hasten.version import __version__

        content = {
            "version": _VERSION,
            "identity": self.identity,
            "written_by": {"hasten": __version__, "torch": torch.__version__},
            "world_size": self.world_size,
            "ranks": self.ranks,
            "checksum": {"kind": "crc32", "bytes": BLOCK},
            "files": {name: {"size": file.size, "crc32": file.crc32} for name, file in sorted(self.files.items())},
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a folder; None if it has none, as those that the reference wrote.

        Raises:
            RuntimeError: the manifest is damaged, or of a later version.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["version"] > _VERSION:
                raise RuntimeError(
                    f"{path} was written by a later version of hasten ({content['written_by']}): update hasten."
                )
            files = {name: Written(entry["size"], tuple(entry["crc32"])) for name, entry in content["files"].items()}
            return cls(files, content["world_size"], tuple(content["ranks"]), content["identity"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"{path} is damaged ({error}). Load another checkpoint.") from error

    def problems(self, places: Iterable[Path], checksums: bool = False) -> list[str]:
        """What is wrong with the files, one line each.

        Args:
            places: folders in which a file may be; the first that has it counts.
            checksums: compare checksums too, which reads every file once; sizes are always compared.
        """
        found = {name: _find(name, places) for name in self.files}
        lines = []
        for name, file in self.files.items():
            path = found[name]
            if path is None:
                lines.append(f"{name} is missing")
            elif (size := path.stat().st_size) != file.size:
                lines.append(f"{name} has {size} bytes instead of {file.size}")
        return lines or (self._damaged(found) if checksums else [])

    def _damaged(self, found: dict[str, Path | None]) -> list[str]:
        workers = Workers()
        try:
            actual = {name: checksum_file(path, workers) for name, path in found.items() if path is not None}
        finally:
            workers.close()
        lines = []
        for name, file in self.files.items():
            if name in actual:
                bad = [n for n, (was, is_) in enumerate(zip(file.crc32, actual[name].crc32, strict=True)) if was != is_]
                if bad:
                    lines.append(f"{name} has changed: its checksum differs from byte {bad[0] * BLOCK} on")
        return lines


def _find(name: str, places: Iterable[Path]) -> Path | None:
    return next((path for path in (place / name for place in places) if path.is_file()), None)
