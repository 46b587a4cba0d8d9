"""The training of the small shipped models: `python -m tools.training`."""
