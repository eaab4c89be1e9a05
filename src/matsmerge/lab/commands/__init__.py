"""The lab's commands of `mats`."""
