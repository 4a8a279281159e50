"""The optimized function under every transformation of JAX, and in every use that jit allows."""
