"""What the user may set: one file per group. Nothing here imports torch."""
