"""One forward pass through one layer: write, attend, observe, evict."""
