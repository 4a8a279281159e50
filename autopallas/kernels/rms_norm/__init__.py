"""RMSNorm: rows divided by the root of their mean square."""
