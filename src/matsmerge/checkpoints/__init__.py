"""Reading model checkpoints, whatever they are stored in, and checking that they fit together."""
