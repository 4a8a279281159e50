"""Programs that are divided among several devices: how each site is divided, as the original would be."""
