"""What crosses the broker's socket: typed messages, errors and limits. Standard library only."""
