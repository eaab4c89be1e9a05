"""Choosing what a merge leaves open by how its result scores on validation data."""
