"""Budgets inside transformers' continuous batching: requests are rows of a cache, and come and go between passes."""
