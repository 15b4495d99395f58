"""Checkpoints that no crash can break: folders as transactions, the state of a run, models, and how many are kept."""
