"""The state of one text (or batch of texts) under a policy and a budget."""
