"""Where am I: devices, processes, meshes and random numbers."""
