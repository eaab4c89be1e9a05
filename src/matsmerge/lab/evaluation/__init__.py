"""How good a model is at its tasks."""
