"""Hugging Face accelerate's names, by hasten."""

from hasten import shadow

shadow.become(__name__)
