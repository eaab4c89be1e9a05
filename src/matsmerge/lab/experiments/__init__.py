"""Suites: from a base model and tasks to tuned merges, their scores and what explains them."""
