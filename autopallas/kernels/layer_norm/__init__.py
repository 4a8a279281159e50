"""LayerNorm: rows less their mean, divided by their standard deviation."""
