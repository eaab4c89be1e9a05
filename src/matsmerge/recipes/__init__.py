"""Recipes: what to merge and how, checked before anything is opened."""
