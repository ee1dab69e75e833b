"""The one place that changes the books, with the deadlines and forecasts that follow from a change."""
