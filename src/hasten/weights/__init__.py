"""Tensors and their files: names and ties, shards and their index, reading and writing."""
