"""Displays and loggers of what an optimizer reports."""
