"""Notebook displays: views, charts, notices, and the line shown while waiting. Each one is available as HTML and as plain text."""
