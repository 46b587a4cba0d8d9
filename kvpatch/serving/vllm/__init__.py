"""Budgets inside vLLM: a plugin that it loads, and an attention backend whose requests hold a constant number of tokens."""
