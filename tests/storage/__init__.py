"""Saved caches."""
