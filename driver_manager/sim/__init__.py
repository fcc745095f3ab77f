"""A cluster, a machine and a clock in memory, in virtual time: for rehearsals, for the demo and for the tests.

Start at `world.World`, for fleets at `fleetworld.FleetWorld`. The facts it copies from real servers and kernels are held by
`tests/contract`.
"""
