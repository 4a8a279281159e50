"""Respellings: equations that a platform computes slowly, written as other equations that compute the same.

There is no kernel here: what runs instead is plain JAX.  Each kind is one module in ``kinds``, found by its name.
"""
