"""Requests gathered into windows."""
