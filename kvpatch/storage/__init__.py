"""Saving and loading compressed caches."""
