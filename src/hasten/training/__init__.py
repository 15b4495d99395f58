"""What turns losses into updates: accumulation, clipping, optimizers and schedulers."""
