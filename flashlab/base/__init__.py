"""The ground floor, which every room may use: arrays of any framework, files, processes, caches, the version."""
