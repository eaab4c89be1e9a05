"""What a model does on its data: measured once, kept in one portable file."""
