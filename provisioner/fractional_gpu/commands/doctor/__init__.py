"""`jupyter gpu doctor` and `jupyter gpu node doctor`: the table of checks, the checks by topic, and the report."""
