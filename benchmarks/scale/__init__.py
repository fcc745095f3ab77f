"""What `controller_scale` runs the controller against: a scripted API server in a process of its own."""
