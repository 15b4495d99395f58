"""How data reaches the ranks: every sample exactly once, in an order that can be continued after an interruption."""
