"""The whole way in one command: `python -m demo`, or `make demo`, which sets everything up first."""
