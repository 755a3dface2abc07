"""The SQL layer: case folders, and what holds for all views."""
