"""Checks before a model is touched, and generate()."""
