"""Splices decisions back into an edited jaxpr; the site primitive."""
