"""The Cluster port on the official client."""
