"""Families of models and adapters."""
