"""What scripts/prepare-vm makes the guest's parts with: each a program of its own that needs nothing but Python."""
