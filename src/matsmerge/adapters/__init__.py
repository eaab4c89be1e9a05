"""PEFT adapters: what they do to a model's weights, and how to write one."""
