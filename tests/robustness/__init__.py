"""Interrupts, misuse, corrupt files, extreme numbers, random sequences and mutants."""
