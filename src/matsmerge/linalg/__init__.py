"""Mathematics on arrays that knows nothing of models."""
