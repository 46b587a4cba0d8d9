"""Prefill, decode steps and stacks of alike layers."""
