"""Models of transformers: loading, heads, adapters, and which tensor each parameter comes from."""
