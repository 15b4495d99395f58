"""All benchmarks, one after the other; each takes the same options."""

import subprocess
import sys

NAMES = (
    "import_time",
    "launch",
    "prepared_loop",
    "loader",
    "ddp_step",
    "collectives",
    "clipping",
    "memory",
    "checkpoint",
)

if __name__ == "__main__":
    failed = [
        name for name in NAMES if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]]).returncode
    ]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
