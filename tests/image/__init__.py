"""The image, built from the real Dockerfile and run without a daemon."""
