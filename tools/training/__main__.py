"""`python -m tools.training`."""

import typer

from .train import main

typer.run(main)
