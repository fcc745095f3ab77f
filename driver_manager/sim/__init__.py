"""Cluster, Host and Clock in memory, in virtual time: for rehearsals, the demo and tests."""
