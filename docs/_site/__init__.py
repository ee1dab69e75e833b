"""The documentation's site: Sphinx over the pages in docs/, with the reference made from the code."""
