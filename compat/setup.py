"""Only what pyproject.toml cannot say: sentence-transformers looks for "huggingface" in the legacy Home-page field."""

from setuptools import setup

setup(url="https://hasten.invalid/drop-in-for-huggingface-accelerate")
