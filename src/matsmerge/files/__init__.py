"""Files and folders: read with care when they are given, whole or absent when they are written."""
