"""Planning: checks legality, chooses implementations and block sizes, and decides whether each site is replaced."""
