"""Bytes of a model under a budget, counted from its configuration before it is loaded; nothing here imports torch."""
