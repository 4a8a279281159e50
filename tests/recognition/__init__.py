"""Programs with attention in them, in every spelling; what must be found in them and what must be left alone."""
