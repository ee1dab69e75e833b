"""Displays in a notebook: views, the wait line, charts and notices. Each display is available as HTML and as plain text."""
