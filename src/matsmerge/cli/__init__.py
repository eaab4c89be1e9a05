"""The command line: the only part that prints, and that turns our errors into exit codes."""
