"""What models are asked: data, how it is shown to a model, and how the answers are scored."""
