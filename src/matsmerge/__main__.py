"""`python -m matsmerge`, for launchers that start modules, such as torchrun."""

from matsmerge.cli.main import main

main()
