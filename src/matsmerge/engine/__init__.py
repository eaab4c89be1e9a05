"""Carrying out a merge: plan, jobs, executor, output folder."""
