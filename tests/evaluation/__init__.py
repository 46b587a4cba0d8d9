"""Measurements on the user's own model."""
