"""The lower layer: problems, devices, the machine, tile programs, formulas. Users import `flashlab`."""

from simulator import catalogue
from simulator.algorithm import Algorithm
from simulator.api import check_formula, count, shape_run, simulate, softmax
from simulator.block import Block
from simulator.catalogue import CATALOGUE
from simulator.config import Config
from simulator.counts import Book, Counts, Spec
from simulator.devices import DEVICES, Device
from simulator.errors import SramOverflow, Unavailable, UsageError
from simulator.machine import Machine
from simulator.operations.attention import Reference, naive, naive_loop, random_inputs
from simulator.operations.caches import QuantizedCache, quantize_cache
from simulator.operations.latent import latent_problem
from simulator.problem import Problem, Tile
from simulator.program import Program, program
from simulator.registers import Registers
from simulator.simulate import Run, Scales
from simulator.tensors import HbmTensor, SramTile
from simulator.time.prediction import Timeline, timeline
from simulator.trace import Trace

__all__ = [
    "Algorithm", "Block", "Book", "CATALOGUE", "Config", "Counts", "DEVICES", "Device", "HbmTensor", "Machine", "Problem",
    "Program", "QuantizedCache", "Reference", "Registers", "Run", "Scales", "Spec", "SramOverflow", "SramTile", "Tile",
    "Timeline", "Trace", "Unavailable", "UsageError", "catalogue", "check_formula", "count", "latent_problem",
    "naive", "naive_loop", "program", "quantize_cache", "random_inputs", "shape_run", "simulate", "softmax", "timeline",
]  # fmt: skip
