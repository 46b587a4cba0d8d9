"""What `python -m tools.evaluate` measures: tasks.py has the table, runs.py the loop, the rest one subject each."""
