"""Replaces the applied sites of a program: defines the site primitives, and splices them into the jaxpr."""
