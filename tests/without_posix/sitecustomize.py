"""Takes away what macOS and Windows do not have, from every Python process whose PYTHONPATH begins with this folder."""

import os
import signal
import sys

import psutil  # noqa: F401  # what it needs of Linux it does not need elsewhere

MODULES = ("fcntl", "resource")
OS_NAMES = ("preadv", "pwritev", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "O_DIRECT", "fdatasync")
SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGHUP")

for _name in MODULES:
    sys.modules[_name] = None  # type: ignore[assignment]  # importing it is an ImportError
for _name in OS_NAMES:
    if hasattr(os, _name):
        delattr(os, _name)
for _name in SIGNALS:
    if hasattr(signal, _name):
        delattr(signal, _name)
