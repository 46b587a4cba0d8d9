"""A compressed cache in a file."""
