"""Custom patterns: a reference computation of the user's, and its replacement."""
