"""Evaluation, benchmarks and the training of the small models that tests and the demo use."""
