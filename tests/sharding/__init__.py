"""Programs that are divided among several devices."""
