"""What is measured of kvpatch's reliability; each part writes a section of docs/reliability.md."""
