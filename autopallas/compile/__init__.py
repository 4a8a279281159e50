"""Compiles ahead of time for devices that this machine does not have."""
