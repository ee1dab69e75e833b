"""`jupyter gpu doctor` and `jupyter gpu node doctor`: one table of checks, the checks by topic, and the report."""
