"""What is measured of kvpatch's reliability; each part writes a page of docs/reliability/."""
