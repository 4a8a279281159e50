"""What arithmetic does to a value: casts, roundings, and the float64 oracle with which results are compared."""
