"""The base of the settings objects that are forwarded to torch as keyword arguments."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any


class KwargsHandler:
    """A group of keyword arguments of which only those that differ from their defaults are forwarded."""

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, deep-copied."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields whose value is not the default."""
        default = type(self)()
        own = self.to_dict()
        return {
            field.name: own[field.name]
            for field in fields(self)  # type: ignore[arg-type]
            if field.init and own[field.name] != getattr(default, field.name)
        }
