"""Tokenlake."""
