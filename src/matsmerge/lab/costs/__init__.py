"""What merging costs: the paper's formulas, and what a run really took."""
