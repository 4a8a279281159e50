"""Programs that are sharded over several devices: each site is sharded as the original would be."""
