"""The command `kvpatch`."""
