"""`python -m hasten.shadow [-m] script ...`: run a script whose `import accelerate` resolves to hasten."""

from __future__ import annotations

import os
import runpy
import sys

from hasten.shadow.modules import install

USAGE = (
    "usage: python -m hasten.shadow script.py [arguments ...]\n       python -m hasten.shadow -m module [arguments ...]"
)


def main(arguments: list[str]) -> int:
    """Run the script or module that `arguments` begin with; return the exit code for a usage error."""
    as_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if as_module else arguments
    if not rest or rest[0] in ("-h", "--help"):
        print(__doc__, USAGE, sep="\n")
        return 0 if rest else 2
    target = rest[0]
    if not as_module and not os.path.exists(target):
        print(f"python -m hasten.shadow: there is no script {target!r} in {os.getcwd()}.", file=sys.stderr)
        return 2
    install()
    sys.argv = rest
    if as_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        # As `python script.py` does: the script's folder, not this package's, comes first.
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        runpy.run_path(target, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
