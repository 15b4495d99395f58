"""Exchanges between the processes of a world, on any nesting of tensors or objects, with agreement checked first."""
