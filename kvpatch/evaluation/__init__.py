"""Measurements on the user's own model and text."""
