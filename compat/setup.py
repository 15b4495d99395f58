"""Only what pyproject.toml cannot say: sentence-transformers looks for "huggingface" in the legacy Home-page field."""

from setuptools import setup

setup(url="https://pypi.org/project/hasten/#drop-in-for-huggingface-accelerate")
