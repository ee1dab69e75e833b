"""`jupyter gpu doctor`: one module for each part of the machine that it checks, and one for the report."""
