"""Folders mirror the package; invariants/ holds its laws, oracle/ a second implementation, helpers/ what tests share."""
