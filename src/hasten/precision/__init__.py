"""The number formats of computation."""
