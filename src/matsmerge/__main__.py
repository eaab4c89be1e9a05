"""`python -m matsmerge`, for launchers that start modules, such as torchrun."""

from matsmerge.cli.main import main

if __name__ == "__main__":  # not in the processes that a suite starts
    main()
