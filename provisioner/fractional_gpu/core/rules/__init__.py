"""Questions over the books that change nothing: eligibility, limits, fairness, costs of victims, reasons of waits."""
