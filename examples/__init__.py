"""What a user would write: one file per feature, each run by a test."""
