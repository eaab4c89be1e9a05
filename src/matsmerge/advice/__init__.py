"""Advice before a merge: do models fit together, what to expect, which recipe to use."""
