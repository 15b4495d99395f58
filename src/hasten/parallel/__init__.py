"""How a model is spread over ranks: the order in plan.py, and one file per strategy."""
