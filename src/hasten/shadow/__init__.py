"""Lets `import accelerate` resolve to hasten: by an import finder in front of all others, nothing is replaced on disk.

python -m hasten.shadow script.py --its --arguments
"""

from __future__ import annotations

from hasten.shadow.modules import become, install, uninstall

__all__ = ["become", "install", "uninstall"]
