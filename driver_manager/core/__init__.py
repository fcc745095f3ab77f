"""The decisions, as plain functions of what was seen, the settings and the time. No input or output here, and no clock."""
