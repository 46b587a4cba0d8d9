"""The training of the small models of tools/models: `python -m tools.training`."""
