"""Sections of reports: one file each, with its figure and the tables that belong to it."""
