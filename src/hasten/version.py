"""The version of this library; a module of its own, since every layer may ask."""

__version__ = "0.1.0"
