"""Programs, and how they are compared: what tests of more than one room use."""
