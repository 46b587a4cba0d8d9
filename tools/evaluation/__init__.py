"""What `python -m tools.evaluation` measures: tasks.py has the table, runs.py the loop, the rest one subject each."""
