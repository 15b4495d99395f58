"""What the user sets about the folders of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class ProjectConfiguration:
    """Where a run keeps its checkpoints and logs.

    Args:
        project_dir: the folder of the run.
        logging_dir: the folder of the trackers' files; `project_dir` when None.
        automatic_checkpoint_naming: `save_state()` writes `project_dir/checkpoints/checkpoint_{iteration}`.
        total_limit: how many automatically named checkpoints are kept; the oldest go first. None keeps all.
        iteration: number of the next automatically named checkpoint.
        save_on_each_node: write model and optimizer files on every machine (for folders that are not shared).
        save_on_signal: names of signals, say ("SIGTERM", "SIGUSR1"), by which the scheduler announces that a machine is taken away:
            when one comes to any process, all save after the same update and leave with exit code 75. Into the next automatically
            named checkpoint, or into `project_dir/preempted`. See `Accelerator.check_preemption` for loops that do it themselves.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    save_on_signal: str | Sequence[str] = field(default=(), kw_only=True)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set `project_dir`, and `logging_dir` too where none is set yet."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(
                f"ProjectConfiguration(total_limit={self.total_limit}): at least one checkpoint must be kept. "
                "Use None to keep all of them."
            )
        if self.save_on_signal:
            from hasten.settings.preemption import signal_names

            self.save_on_signal = signal_names(self.save_on_signal)
        self.set_directories(self.project_dir)
