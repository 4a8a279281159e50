"""Ahead-of-time compilation for devices that this machine does not have."""
