"""Many hosts: sessions are given to hosts beforehand, each host runs by itself, and the figures are added up."""
