"""Runs kernels to learn how fast they are: probes, trials, searches."""
