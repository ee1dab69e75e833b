"""`jupyter gpu doctor` and `jupyter gpu node doctor`, with a table of all checks, the checks by topic, and the report."""
