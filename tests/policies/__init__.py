"""Scores, scopes, budgets and allocation."""
