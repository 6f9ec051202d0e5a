"""Plans as text and as a web page."""
