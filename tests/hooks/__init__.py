"""What is checked on a model before it is touched."""
