"""Displays in a notebook: views, the wait line, charts, notices; each as HTML and as plain text."""
