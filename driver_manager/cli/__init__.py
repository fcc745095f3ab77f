"""Text in, exit code out. Nothing is decided here."""
