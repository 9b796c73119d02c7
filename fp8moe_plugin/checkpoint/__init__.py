"""A checkpoint's description, read as untrusted input, and the shapes of its layers on each rank."""
