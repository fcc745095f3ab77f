"""The node agent: observe, plan, execute, restore, on one node."""
