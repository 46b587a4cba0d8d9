"""The benchmark, the evaluation, the training and the reliability tools."""
