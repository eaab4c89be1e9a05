"""Kinds of tasks: how a row becomes an example, and an output of the model an answer."""
