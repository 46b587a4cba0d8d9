"""Laws that hold for every policy, architecture and batch."""
