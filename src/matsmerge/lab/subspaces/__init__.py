"""Task parameter subspaces, looked at: spectra, overlaps, and what a merge did to them."""
