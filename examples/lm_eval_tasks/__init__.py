"""Tasks of lm-evaluation-harness on files of this folder."""
