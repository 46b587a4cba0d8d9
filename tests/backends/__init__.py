"""The torch, Triton and flash backends."""
