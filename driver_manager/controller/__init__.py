"""The cluster-side controller: takes a fleet through driver changes, one node after another, under a budget."""
