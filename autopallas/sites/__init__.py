"""Vocabulary of all stages: device, operation, site, index notation, elementwise program.  Imports no stage."""
