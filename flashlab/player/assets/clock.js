// One clock for all traces of a page: positions 0 … length - 1, and the event at which each trace is at a position.

/** Every position is a step. A trace with fewer steps waits at its last one. */
function stepClock(traces) {
  return {
    name: "steps",
    length: Math.max(...traces.map((trace) => trace.length)),
    at: (position) => traces.map((trace) => Math.min(position, trace.length - 1)),
    position: (which, t) => t,
  };
}

/** Positions are the steps of all traces in the order of the bytes requested from HBM by then. */
function byteClock(traces) {
  const order = traces.flatMap((trace, which) => Array.from(trace.hbm, (bytes, t) => ({ which, t, bytes })));
  order.sort((a, b) => a.bytes - b.bytes || a.which - b.which || a.t - b.t);
  const place = traces.map((trace) => new Int32Array(trace.length));
  const events = traces.map(() => new Int32Array(order.length));
  const now = traces.map(() => -1);
  order.forEach(({ which, t }, position) => {
    now[which] = t;
    place[which][t] = position;
    now.forEach((event, each) => (events[each][position] = event));
  });
  return {
    name: "bytes",
    length: order.length,
    at: (position) => events.map((each) => each[position]),
    position: (which, t) => place[which][t],
  };
}
