"""A call: arrays of any framework, plans, launches on a GPU, on the emulator, on the simulator."""
