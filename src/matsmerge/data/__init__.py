"""Data: rows with named columns, wherever they are stored, read within limits and checked."""
