"""The parts of a model that a patch finds, checks and replaces."""
