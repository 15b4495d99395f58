"""The state objects that user code knows: views of a world and of what an Accelerator was set to."""
