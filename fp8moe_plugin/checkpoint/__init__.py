"""A checkpoint's metadata, read as untrusted input, and the shapes of its layers on each rank."""
